"""Cells: how engines of different parallel sizes share (share_tp, share_pp)."""
