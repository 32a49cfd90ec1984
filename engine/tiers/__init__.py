"""Below the device: host memory and disk, what is copied there and back, and what can go wrong."""
