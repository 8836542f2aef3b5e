"""Folders of pictures with captions, as samples by id. No engine is imported here."""
