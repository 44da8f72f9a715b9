"""The hook of hatchling that puts the agent's program into the wheel, as the script `kvagent`.

KVAGENT_PROGRAM names the program, as `make wheel` does. Without it the wheel is pure Python.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = {62: "x86_64", 183: "aarch64"}
"""Names of platforms by e_machine, elf(5)."""


class Program(BuildHookInterface):  # type: ignore[type-arg]
    """The program and the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the program. Raises KeyError if it is for another machine."""
        program = os.environ.get("KVAGENT_PROGRAM")
        if not program:
            return
        with Path(program).open("rb") as file:
            machine = int.from_bytes(file.read(20)[18:], "little")
        build_data["pure_python"] = False
        build_data["shared_scripts"] = {program: "kvagent"}
        build_data["tag"] = f"py3-none-manylinux_2_28_{MACHINES[machine]}"
