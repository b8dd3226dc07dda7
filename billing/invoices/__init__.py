"""A month of an account as a document: closed once, written once, shown as HTML, PDF and CSV."""
