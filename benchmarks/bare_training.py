"""What benchmarks/preemption.py compares the start of a rank with: the same training as a bare script.

    python -m benchmarks.bare_training FOLDER SECONDS_PER_STEP

Loads FOLDER/bare.pt if there is one, trains one step, saves if there was none, and prints the seconds from
the start of its process to the end of that step.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    """As that of tests/end_to_end/parts.py, which imports hpc-train."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.relu(self.norm(self.conv(images))))
        return images + hidden


def net() -> nn.Module:
    """Return the network that hpc-train's rank trains, for 1×32×32 images of 10 classes."""
    blocks = nn.Sequential(Block(), Block())
    return nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), blocks, nn.Flatten(), nn.Linear(8 * 8 * 8, 10))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit((__doc__ or "").split("\n\n")[1].strip())
    file, step_s = Path(sys.argv[1]) / "bare.pt", float(sys.argv[2])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_resumed := file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    time.sleep(step_s)
    cross_entropy(model(torch.randn(48, 1, 32, 32)), torch.randint(10, (48,))).backward()
    optimizer.step()
    print(f"{(datetime.now(UTC) - process_start()).total_seconds():.3f}")
    if not is_resumed:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def process_start() -> datetime:
    """Return when this process began, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return datetime.fromtimestamp(time.time() - (up_s - ticks / 100), UTC)


if __name__ == "__main__":
    main()
