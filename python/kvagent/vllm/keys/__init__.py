"""The keys of blocks that a request's tokens alone do not name: items, adapters, drafts."""
