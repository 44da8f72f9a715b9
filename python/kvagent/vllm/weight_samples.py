"""Samples of a model's weights, by which writes to them are detected."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SAMPLED = 64
"""Evenly spaced elements of each tensor; a change of fewer than one in size / 64 may be missed."""

_INTEGER = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""By element size: torch's type as which elements are gathered, whatever they mean."""


class Samples:
    """Takes samples of one torch module.

    A sample is a digest of SAMPLED elements of every parameter and buffer, and of their names,
    types and shapes. A sample at an idle engine delays a request, so the views of the elements are
    made once, and again where a tensor was replaced or has other memory; they keep replaced memory
    until then. Each device gathers them at once and copies them once.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._modules: list[Any] = []
        self._places: list[int] = []
        """Of all submodules and tensors when the views were made."""
        self._head = b""
        self._views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        self._scattered: list[torch.Tensor] = []
        """Tensors without such a view, which are copied whole."""

    def take(self) -> bytes:
        """Return a sample."""
        import torch

        if not self._places or _places(self._modules) != self._places:
            self._look()
        digest = hashlib.sha256(self._head)
        parts = [torch.cat(views) for views in self._views.values()]
        parts += [_spaced(tensor.detach().reshape(-1)).contiguous() for tensor in self._scattered]
        for device in sorted({part.device for part in parts}, key=str):
            here = [part.view(torch.uint8) for part in parts if part.device == device]
            digest.update((here[0] if len(here) == 1 else torch.cat(here)).cpu().numpy().tobytes())
        return digest.digest()

    def forget(self) -> None:
        """Drop the views, and with them the memory of tensors that will be replaced."""
        self._places, self._views, self._scattered = [], {}, []

    def _look(self) -> None:
        """Make the views."""
        import torch

        self.forget()
        self._modules, head = list(self.model.modules()), []
        for name, tensor in itertools.chain(self.model.named_parameters(), self.model.named_buffers()):
            head.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n")
            if tensor.is_meta or not tensor.numel():
                continue
            if _dense(tensor) and tensor.element_size() in _INTEGER:
                flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
                view = _spaced(flat.view(getattr(torch, _INTEGER[tensor.element_size()])))
                self._views.setdefault((tensor.device, view.dtype), []).append(view)
            else:
                self._scattered.append(tensor)
        self._head, self._places = "".join(head).encode(), _places(self._modules)


def _spaced(flat: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements, an odd number apart, so that not all lie in few columns."""
    return flat[:: flat.numel() // SAMPLED | 1]


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory, in whatever order of dimensions."""
    want = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != want:
            return False
        want *= size
    return True


def _places(modules: list[Any]) -> list[int]:
    """Return what tells that a module has other submodules, or tensors with other memory. As long
    as there are views of a memory, no other has its address.
    """
    tensors = (each for m in modules for some in (m._parameters, m._buffers) for each in some.values())
    places = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    places.extend(id(child) for m in modules for child in m._modules.values())
    return places
