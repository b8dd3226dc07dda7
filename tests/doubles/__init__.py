"""Stand-ins that speak a real protocol over a real socket and do what a test tells them."""
