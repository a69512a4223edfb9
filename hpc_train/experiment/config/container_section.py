"""``environment.container``: the image in which ranks run, the program that runs it, and its mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hpc_train.experiment.config.fields import SCRIPT_PATH_PATTERN, Section, pattern

#: A path in a container's options, whose lists are separated by ',' and ':'.
_PATH = r"""/[^\s'"\\$`;&|<>,:\x00-\x1f\x7f]{0,1023}"""
_MOUNT = rf"{_PATH}(:{_PATH})?(:(ro|rw))?"
_OPTION = r"""--[a-z][a-z0-9-]{0,63}(=[^\s'"\\$`;&|<>\x00-\x1f\x7f]{1,512})?"""
#: Beginnings of an image that is a path, also for runtimes that take names of a registry.
_PATH_STARTS = ("/", "./", "../", "~/")


class ContainerConfig(Section):
    """A container for the ranks. ``container: IMAGE`` is short for ``{image: IMAGE}``."""

    image: Annotated[
        str,
        pattern(
            SCRIPT_PATH_PATTERN,
            "a path or an address without blanks, quotes, '$' or ';', like /images/torch.sif",
        ),
        Field(examples=["/images/torch.sif"]),
    ]
    """Image: a file, a folder with a root file system, or an address such as ``docker://…``, as the runtime
    reads it."""
    runtime: Literal["apptainer", "podman", "pyxis"] = "apptainer"
    """Program that runs the image: Apptainer (or Singularity), podman, or pyxis, Slurm's plug-in for enroot.
    """
    mounts: list[
        Annotated[
            str,
            pattern(
                _MOUNT, "an absolute path, or SOURCE:TARGET with :ro if read-only, like /scratch:/data:ro"
            ),
        ]
    ] = []
    """More files and folders of the node that ranks see, ``SOURCE``, ``SOURCE:TARGET`` or
    ``SOURCE:TARGET:ro``. Runs, data and the current folder are always mounted. Default: no others."""
    options: list[Annotated[str, pattern(_OPTION, "one long option like --shm-size=16g")]] = []
    """More options of the runtime. Options that hpc-train sets itself are rejected. Default: none."""

    @property
    def is_path(self) -> bool:
        """Whether the image is a path of the node, not an address."""
        if self.runtime == "apptainer":
            return "://" not in self.image
        is_squashfs = self.runtime == "pyxis" and self.image.endswith(".sqsh")
        return is_squashfs or self.image.startswith(_PATH_STARTS)

    @property
    def image_name(self) -> str:
        """The image as the runtime reads it; a path is absolute, from the current folder."""
        return str(Path(self.image).expanduser().absolute()) if self.is_path else self.image


#: In a file also the image alone.
ContainerOrImage = Annotated[
    ContainerConfig, BeforeValidator(lambda value: {"image": value} if isinstance(value, str) else value)
]


def mount_parts(mount: str) -> tuple[str, str, str]:
    """Return source, target and mode (``rw`` or ``ro``) of one of ``mounts``."""
    *paths, last = mount.split(":")
    if last not in {"ro", "rw"}:
        paths, last = [*paths, last], "rw"
    return paths[0], paths[-1], last
