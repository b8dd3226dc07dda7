"""A new revision of a model beside the old one: who is served by which, how they compare, and what is decided of it."""
