"""The paged key/value cache: who owns which page, and the tensors behind the pages."""
