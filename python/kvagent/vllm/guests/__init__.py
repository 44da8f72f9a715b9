"""The guests of the connector: each is imported only where its option, or the model, asks for it.

The core imports none of them. Without this folder it serves what needs no guest.
"""
