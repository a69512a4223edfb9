from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.building import build_model
from hpc_train.training.models.gpt import GPT, Attention, Block, GPTArgs, rotary_table

TEXT = DataInfo(11, 0, (), (), sequence_length=8)
SMALL = {"num_layers": 2, "num_heads": 2, "dim": 12}


def gpt(info: DataInfo = TEXT, pretrained: bool | str = False, **args: Any) -> GPT:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="gpt", pretrained=pretrained, args=SMALL | args), info)
    assert isinstance(model, GPT)
    return model


def tokens(length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(11, (3, length), generator=torch.Generator().manual_seed(seed))


def test_a_token_changes_no_logit_before_it() -> None:
    model = gpt().double().eval()
    given = tokens()
    before = model(given)
    for place in range(8):
        changed = given.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
        assert (after[:, place:] - before[:, place:]).abs().amax(dim=(0, 2)).min() > 1e-6, "all that follow"


def test_a_shorter_sequence_has_the_logits_of_its_beginning() -> None:
    model = gpt().double().eval()
    torch.testing.assert_close(model(tokens()[:, :5]), model(tokens())[:, :5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tie", [True, False])
def test_the_number_of_parameters_is_the_formulas(tie: bool) -> None:
    layers, dim, vocabulary, length = 3, 20, 11, 8
    attention = 4 * (dim * dim + dim)
    mlp = 2 * 4 * dim * dim + 4 * dim + dim
    norms = 2 * 2 * dim
    expected = vocabulary * dim + length * dim + layers * (attention + mlp + norms) + 2 * dim
    expected += 0 if tie else vocabulary * dim
    model = gpt(num_layers=layers, num_heads=4, dim=dim, tie_embeddings=tie)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_attention_is_that_of_the_definition() -> None:
    """softmax(QKᵀ/√K)V over what came before, written out head by head."""
    torch.manual_seed(1)
    layer = Attention(GPTArgs(dim=12, num_heads=3)).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = (each(x) for each in (layer.wq, layer.wk, layer.wv))
    heads = []
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    torch.testing.assert_close(layer(x), layer.wo(torch.cat(heads, -1)))


def test_blocks_are_those_of_the_model() -> None:
    model = gpt()
    assert find_blocks(model) == list(model.layers)
    assert all(type(block) is Block for block in find_blocks(model))


def test_weights_begin_as_gpt2s_do() -> None:
    model = gpt(num_layers=8, dim=128)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            adds = name.endswith((".wo.weight", ".down.weight"))
            expected = 0.02 / math.sqrt(16) if adds else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_an_untrained_model_knows_nothing() -> None:
    """Its loss is that of guessing evenly, so no logit is favoured from the start."""
    logits = gpt(dim=64, num_heads=4)(tokens())
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens(seed=1).flatten())
    assert loss.item() == pytest.approx(math.log(11), abs=0.1)


def test_tied_embeddings_are_one_tensor_with_two_names() -> None:
    named = NamedTensors.of(gpt())
    assert named.tied == {"head.weight": "token_embedding.weight"}
    assert "head.weight" not in named.tensors
    assert NamedTensors.of(gpt(tie_embeddings=False)).tied == {}


@pytest.mark.parametrize("tie", [True, False])
def test_weights_of_a_file_are_loaded(tie: bool, tmp_path: Path) -> None:
    saved = gpt(tie_embeddings=tie)
    nn.init.normal_(saved.token_embedding.weight)
    path = tmp_path / "gpt.safetensors"
    save_file({name: value.clone() for name, value in saved.state_dict().items()}, path)
    loaded = gpt(tie_embeddings=tie, pretrained=str(path)).eval()
    assert torch.equal(loaded(tokens()), saved.eval()(tokens()))


def test_dropout_is_off_in_evaluation_alone() -> None:
    model = gpt(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    plain = gpt()
    assert torch.equal(model(tokens()), plain.eval()(tokens()))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"dim": 13}, r"^model.args.dim: 13 is not a multiple of num_heads 2; write 14"),
        ({"dim": 3, "num_heads": 5}, r"^model.args.dim: .*; write 5"),
        ({"dropout": 1.0}, r"^model.args.dropout: needs a number .*, got 1.0"),
        ({"num_layers": 0}, r"^model.args.num_layers: needs a whole number of at least 1, got 0"),
        ({"tie_embeddings": "no"}, r"^model.args.tie_embeddings: needs true or false, got the text 'no'"),
        ({"num_head": 2}, r"^model.args.num_head: .* takes no argument 'num_head'; did you mean 'num_heads'"),
        ({"num_kv_heads": 1}, r"^model.args.num_kv_heads: is for style llama; write style: llama too"),
        ({"style": "llama", "num_heads": 6, "num_kv_heads": 4}, r"num_kv_heads: 4 does not .*; write 3$"),
        ({"style": "llama", "num_heads": 4}, r"^model.args.dim: 12 gives each of 4 heads 3 .*write 16$"),
        ({"style": "opt"}, r"^model.args.style: needs one of gpt2, llama, got the text 'opt'"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        gpt(**args)


def test_unsupported_settings_of_gpt_are_reported() -> None:
    with pytest.raises(BadFileError, match=r"^model.name: gpt reads tokens, .* has images; write data.name"):
        gpt(DataInfo(10, 3, (0.5,) * 3, (0.5,) * 3))
    with pytest.raises(BadFileError, match=r"^model.pretrained: gpt has no weights on a hub"):
        gpt(pretrained=True)
    with pytest.raises(BadFileError, match=r"^model.name: gpt takes no name after it; write gpt$"):
        build_model(ModelConfig(name="gpt/2"), TEXT)
    assert gpt(num_classes=64).head.out_features == 64, "the file wins over the data"


LLAMA = {"style": "llama", "num_heads": 4, "num_kv_heads": 2, "dim": 16, "hidden_dim": 20, "num_layers": 2}


class PlainLlama:
    """Llama's forward written out position by position, from the weights of a model of ours."""

    def __init__(self, model: GPT, theta: float, eps: float) -> None:
        self.weights = dict(model.named_parameters())
        self.layers, self.theta, self.eps = len(model.layers), theta, eps

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        weights = self.weights
        x = weights["token_embedding.weight"][tokens_BT]
        for layer in range(self.layers):
            own = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
            x = x + self.attention(self.norm(x, own["attention_norm.weight"]), own)
            h = self.norm(x, own["mlp_norm.weight"])
            gate = h @ own["mlp.gate.weight"].T
            x = x + (gate * torch.sigmoid(gate) * (h @ own["mlp.up.weight"].T)) @ own["mlp.down.weight"].T
        head = weights.get("head.weight", weights["token_embedding.weight"])
        return self.norm(x, weights["norm.weight"]) @ head.T

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def turned(self, head_BTK: Tensor) -> Tensor:
        """Multiply each pair, as a complex number, by its angle's."""
        length, width = head_BTK.shape[1:]
        pairs = torch.complex(head_BTK[..., : width // 2], head_BTK[..., width // 2 :])
        places = torch.arange(length, dtype=torch.float64)[:, None]
        angles = places / self.theta ** (torch.arange(width // 2, dtype=torch.float64) * 2 / width)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        q, k, v = (x @ own[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        heads = []
        for head in range(4):
            mine, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
            scores = self.turned(q[..., mine]) @ self.turned(k[..., shared]).transpose(1, 2) / 2
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[..., shared])
        return torch.cat(heads, -1) @ own["attention.wo.weight"].T


@pytest.mark.parametrize("tie", [True, False])
def test_twenty_steps_of_llama_are_those_of_a_plain_one(tie: bool) -> None:
    ours = gpt(**LLAMA, tie_embeddings=tie, rope_theta=100.0, norm_eps=1e-3).double()
    theirs = gpt(**LLAMA, tie_embeddings=tie, rope_theta=100.0, norm_eps=1e-3).double()
    plain = PlainLlama(theirs, 100.0, 1e-3)
    losses = []
    for model, forward in ((ours, ours), (theirs, plain)):
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        losses.append([])
        for step in range(20):
            given = tokens(seed=step)
            loss = functional.cross_entropy(forward(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], value, rtol=0, atol=1e-9, msg=name)


def test_llama_has_the_parameters_of_the_formula() -> None:
    model = gpt(**LLAMA)
    attention, mlp = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 20
    assert sum(p.numel() for p in model.parameters()) == 11 * 16 + 2 * (attention + mlp + 32) + 16
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    whole = gpt(style="llama", num_heads=2, dim=96, num_layers=1)
    assert whole.layers[0].mlp.up.out_features == 256, "8/3 of the width, rounded up to a multiple of 64"
    assert whole.layers[0].attention.wk.out_features == 96


def test_rotary_angles_are_not_rounded_to_bfloat16() -> None:
    layer = gpt(**LLAMA).layers[0].attention
    cos_TK, _ = rotary_table(torch.zeros(1, 1, 1000, 4, dtype=torch.bfloat16), 10000.0)
    assert cos_TK.dtype == torch.float32 and cos_TK[999, 0].item() == pytest.approx(math.cos(999), abs=1e-4)
    assert layer.to(torch.bfloat16)(torch.zeros(1, 3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
