"""Model plug-ins: build an ``nn.Module`` from a name of the file."""

from hpc_train.training.distributed.timm_imports import keep_wandb_out

keep_wandb_out()  # here, since ranks and the children of commands import it before timm
