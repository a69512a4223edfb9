# ruff: noqa: N803, N806  (shape suffixes)
"""``task: classification``: one class per sample, shares of the classes, or several classes at once.

Legend: B samples of a batch, N of the validation data, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec
from hpc_train.training.tasks import class_losses, drawing
from hpc_train.training.tasks.base import Task, at_least_float32, checked_logits, class_table

#: The k of ``accuracy_top5``; with k classes or fewer it would always be 1.
_TOP = 5
#: Maximum number of classes for a confusion matrix in evaluations (assumed: 2 MB as text).
_MAX_CONFUSION_CLASSES = 1000
#: Maximum number of labels of a sample in its picture (assumed).
_MAX_LABELS = 4
#: The rows of ``outcomes``: (class is present, class is predicted).
_OUTCOMES = ((True, True), (False, True), (True, False), (False, False))


class Classification(Task):
    """Logits (B, C) against classes (B,) int64 or vectors (B, C).

    Vectors are shares of the classes with cross entropy; with other losses a yes (1) or no (0) per class.
    """

    training_metrics = ("accuracy",)

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        config = experiment.optimization
        num_classes = experiment.model.args.get("num_classes", info.num_classes)
        has_vectors = info.target_shape != ()
        is_cross_entropy = config.loss is not None and config.loss.name == "cross_entropy"
        self._has_several = has_vectors and not is_cross_entropy
        self._num_classes = num_classes
        self._has_top5 = num_classes > _TOP
        if num_classes == 1 and not has_vectors:
            _refuse_one_class(experiment.data.name, info)
        if not self._has_top5:
            _check_top5_is_unused(experiment)
        self._class_names = info.class_names
        self._label_smoothing = config.label_smoothing
        self._losses = class_losses.make_class_loss(config.loss, num_classes, has_several=self._has_several)
        #: See ``Task``.
        self.weight = self._total_weight if self._losses.weighs_samples else None
        self.target_spec = TargetSpec(
            "a class number", kind="integer", shape=(), minimum=0, maximum=num_classes - 1
        )
        if has_vectors:
            self.target_spec = TargetSpec(
                "a yes (1) or no (0) per class" if self._has_several else "the share of each class",
                kind="any" if self._has_several else "float",
                shape=(num_classes,),
                minimum=0,
                maximum=1,
                total=None if self._has_several else 1,
            )

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean over the samples, or over their class weights, of the loss with label smoothing."""
        return self._losses.mean(self._logits(outputs), batch.targets, self._label_smoothing)

    def _total_weight(self, batch: Batch) -> Tensor:
        """Return the sum of the samples' class weights; for mixed samples their number."""
        weights = self._losses.weights(batch.targets)
        return batch.valid.sum() if weights is None else weights.sum()

    def _logits(self, outputs: Tensor) -> Tensor:
        return checked_logits(outputs, "B, C", self._num_classes)

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return targets as shares of the classes, (B, C) float64, for mixup."""
        return class_losses.as_shares(targets, self._num_classes, torch.float64)

    def training_sums(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the number of correct predictions, (1,): with mixup, of the class with the larger share."""
        if self._has_several:
            is_right = ((outputs >= 0) == (batch.targets > 0.5)).all(dim=1)
        else:
            is_right = outputs.argmax(dim=1) == _classes(batch.targets)
        return is_right.sum(dtype=torch.float64)[None]

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Any]:
        """Return ``count``, the sum ``loss`` (without smoothing), ``weight`` (the sum of class weights, if
        there are any), and the other sums that ``metrics`` reads.
        """
        logits = self._logits(outputs)
        losses = self._losses(logits, batch.targets)
        # No product with ``valid``: the values of a padding sample may be NaN.
        sums = {"count": batch.valid, "loss": torch.where(batch.valid, losses, torch.zeros_like(losses))}
        if (weights := self._losses.weights(batch.targets)) is not None:
            sums["weight"] = torch.where(batch.valid, weights, 0.0)
        if self._has_several:
            return _totals(sums) | label_sums(
                logits, class_losses.as_shares(batch.targets, logits.shape[1], logits.dtype), batch
            )
        classes = _classes(batch.targets)
        predictions = logits.argmax(dim=1)
        sums["correct"] = (predictions == classes) & batch.valid
        if self._has_top5:
            among = (logits.topk(_TOP, dim=1).indices == classes[:, None]).any(dim=1)
            sums["correct5"] = among & batch.valid
        totals: dict[str, Any] = _totals(sums)
        if logits.shape[1] <= _MAX_CONFUSION_CLASSES:
            totals["confusion"] = _confusion(classes, predictions, batch.valid, logits.shape[1])
        return totals

    def predictions(self, outputs: Tensor, batch: Batch) -> list[dict[str, Any]]:
        """Return for each sample the class with the highest probability, and the ``top`` five.

        With several labels per sample: all ``probabilities``, and the ``labels`` of at least 0.5.
        """
        logits = self._logits(outputs)
        if self._has_several:
            return [self._labels(row) for row in logits.sigmoid().tolist()]
        highest, classes = logits.softmax(dim=1).topk(min(_TOP, outputs.shape[1]), dim=1)
        rows = zip(highest.tolist(), classes.tolist(), strict=True)
        tops = [
            [
                {"class": self._class_name(number), "probability": value}
                for value, number in zip(*row, strict=True)
            ]
            for row in rows
        ]
        return [{**top[0], "top": top} for top in tops]

    def _labels(self, probabilities: list[float]) -> dict[str, Any]:
        labels = [self._class_name(number) for number, value in enumerate(probabilities) if value >= 0.5]
        return {"labels": labels, "probabilities": probabilities}

    def _class_name(self, number: int) -> str | int:
        has_name = len(self._class_names) == self._num_classes and number < self._num_classes
        return self._class_names[number] if has_name else number

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return means over the validation data."""
        count = sums["count"]
        loss = sums["loss"] / (sums.get("weight", count) or 1.0)  # 0 if all samples have the weight 0
        metrics = {"loss": loss, "accuracy": sums["correct"] / count}
        if "correct5" in sums:
            metrics["accuracy_top5"] = sums["correct5"] / count
        if self._has_several:
            metrics |= label_metrics(sums)
        return metrics

    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        """Return the confusion matrix as a table; with several labels, one line per class."""
        if self._has_several:
            columns = ["true_positives", "false_positives", "false_negatives", "true_negatives"]
            outcomes = sums["outcomes"].T
            return {"confusion_per_class.csv": class_table(columns, self._names(len(outcomes)), outcomes)}
        if "confusion" not in sums:
            return {}
        confusion = sums["confusion"]
        names = self._names(len(confusion))
        return {"confusion_matrix.csv": class_table(names, names, confusion)}

    def picture(self, outputs: Tensor, batch: Batch, place: int, image: Image.Image) -> Image.Image:
        """Return the image above its class and the predicted class with its probability.

        The frame is green for a correct prediction and red for a wrong one. With several labels per sample:
        the labels, and the predicted labels with their probabilities.
        """
        logits = at_least_float32(outputs[place])
        target = batch.targets[place]
        if self._has_several:
            true, positive, chances = target > 0.5, logits >= 0, logits.sigmoid()
            names, guesses = self._label_names(true), self._label_names(positive, chances)
            is_right = torch.equal(true, positive)
            numbers = (true | positive).nonzero().flatten().tolist()
        else:
            chances = logits.softmax(dim=0)
            number, predicted = int(_classes(target[None])), int(chances.argmax())
            names, guesses = [self._short(number)], [f"{self._short(predicted)} {chances[predicted]:.2f}"]
            is_right = number == predicted
            numbers = sorted({number, predicted})
        color, verdict = (drawing.RIGHT, "") if is_right else (drawing.WRONG, " (wrong)")
        lines = _caption("true: ", names, drawing.INK) + _caption("predicted: ", guesses, color)
        lines[-1] = (lines[-1][0] + verdict, color)
        shown = drawing.with_caption(drawing.framed(drawing.fitted(image), color), lines)
        return drawing.described(
            shown, classes=[self._short(number) for number in numbers], error=int(not is_right)
        )

    def _label_names(self, is_label: Tensor, chances: Tensor | None = None) -> list[str]:
        """Return the names of the first few labels, with ``chances`` in order of descending probability."""
        numbers = is_label.nonzero().flatten().tolist()
        if chances is not None:
            numbers.sort(key=lambda number: -float(chances[number]))
        names = [
            self._short(number) + ("" if chances is None else f" {chances[number]:.2f}")
            for number in numbers[:_MAX_LABELS]
        ]
        more = len(numbers) - _MAX_LABELS
        return [*names, f"{more} more"] if more > 0 else names or ["none"]

    def _short(self, number: int) -> str:
        return drawing.short(self._class_name(number))

    def _names(self, count: int) -> Sequence[str]:
        return self._class_names if len(self._class_names) == count else [str(i) for i in range(count)]


def _refuse_one_class(data: str, info: DataInfo) -> NoReturn:
    """Raise BadFileError: every prediction would be right."""
    named = f", {info.class_names[0]}" if info.class_names else ""
    below = "; a class is a folder directly below train/" if data == "imagefolder" else ""
    raise BadFileError(
        f"data.name: {data} has one class{named}, and classification needs two or more{below}; fix the data"
    )


def _check_top5_is_unused(experiment: Experiment) -> None:
    """Raise BadFileError if the file follows a metric that needs more classes."""
    for key, followed in (
        ("checkpoint.best.metric", experiment.checkpoint.best),
        ("early_stopping.metric", experiment.early_stopping),
    ):
        if followed is not None and followed.metric.removeprefix("ema_") == "accuracy_top5":
            raise BadFileError(
                f"{key}: accuracy_top5 needs more than {_TOP} classes; write accuracy or another metric"
            )


def _totals(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}


def _classes(targets: Tensor) -> Tensor:
    """Return the class of each sample, (B,); for shares the class with the largest share."""
    return targets if targets.dim() == 1 else targets.argmax(dim=1)


def _confusion(classes: Tensor, predictions: Tensor, valid: Tensor, num_classes: int) -> Tensor:
    """Return (class, prediction) counts, int64, without the device synchronization of ``bincount``."""
    counts = classes.new_zeros((num_classes, num_classes))
    return counts.index_put_((classes, predictions), valid.to(torch.int64), accumulate=True)


def _caption(title: str, names: Sequence[str], color: drawing.Color) -> list[tuple[str, drawing.Color]]:
    """Return a line per name, the first one after the title."""
    return [(f"{title if place == 0 else '    '}{name}", color) for place, name in enumerate(names)]


def label_sums(logits_BC: Tensor, targets_BC: Tensor, batch: Batch) -> dict[str, Any]:
    """Return the sums that ``label_metrics`` reads. A class is predicted if its probability is at least ½.

    ``correct``: samples with all classes right; ``outcomes``, (4, C) int64: true positives, false positives,
    false negatives and true negatives of each class; ``scores``: a record (2, C) of each sample.
    """
    is_true, is_predicted, valid = targets_BC > 0.5, logits_BC >= 0, batch.valid
    outcomes = [
        ((is_true == true) & (is_predicted == predicted) & valid[:, None]).sum(0)
        for true, predicted in _OUTCOMES
    ]
    return {
        "correct": ((is_true == is_predicted).all(dim=1) & valid).sum(dtype=torch.float64),
        "outcomes": torch.stack(outcomes),
        "scores": list(torch.stack([logits_BC, is_true.to(logits_BC.dtype)], dim=1)),
    }


def label_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Return ``f1_micro``, ``f1_macro`` and ``map_multilabel``, without the classes that no sample has.

    Defined as in scikit-learn, with an F1 score of 0 for a class that is neither present nor predicted.
    """
    hits_C, wrong_C, missed_C, _ = sums["outcomes"].double()
    scores_NC, are_true_NC = torch.stack(sums["scores"]).unbind(1)
    precisions = [
        average_precision(scores_N, are_true_N)
        for scores_N, are_true_N in zip(scores_NC.T, are_true_NC.T, strict=True)
        if are_true_N.any()
    ]
    return {
        "f1_micro": _f1(hits_C.sum(), (wrong_C + missed_C).sum()).item(),
        "f1_macro": _f1(hits_C, wrong_C + missed_C).mean().item(),
        "map_multilabel": sum(precisions) / len(precisions) if precisions else 0.0,
    }


def _f1(hits: Tensor, errors: Tensor) -> Tensor:
    return 2 * hits / (2 * hits + errors).clamp(min=1)


def average_precision(scores_N: Tensor, are_true_N: Tensor) -> float:
    """Return Σ (Rₖ - Rₖ₋₁) Pₖ over the thresholds k: all scores that occur, so that ties have no order."""
    sorted_N, order_N = scores_N.sort(descending=True)
    hits_N = are_true_N[order_N].double().cumsum(0)
    is_last_N = torch.ones_like(sorted_N, dtype=torch.bool)
    is_last_N[:-1] = sorted_N[:-1] != sorted_N[1:]
    counts_N = torch.arange(1, len(sorted_N) + 1, dtype=torch.float64)
    hits_K, counts_K = hits_N[is_last_N], counts_N[is_last_N]
    gained_K = hits_K.diff(prepend=hits_K.new_zeros(1))
    return float((gained_K * hits_K / counts_K).sum() / hits_N[-1])
