"""What a campaign's folders come to: a summary, a page to act on, and XML for CI."""
