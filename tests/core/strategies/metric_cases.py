"""Every torchmetrics metric with data, updated with slices of unequal size and empty ones.

Ranks import this. A case makes a metric, and its arguments as lists or tensors with one entry per example.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from torchmetrics import classification, regression, retrieval

ROWS = 12

LEFT_OUT = {
    "ARNIQA": "downloads weights",
    "BERTScore": "downloads a language model",
    "BootStrapper": "draws random numbers for each update",
    "CLIPImageQualityAssessment": "downloads weights",
    "CLIPScore": "downloads weights",
    "ClusterAccuracy": "needs torch_linear_assignment",
    "CompleteIntersectionOverUnion": "needs torchvision",
    "DeepImageStructureAndTextureSimilarity": "downloads weights",
    "DeepNoiseSuppressionMeanOpinionScore": "downloads weights",
    "DistanceIntersectionOverUnion": "needs torchvision",
    "FeatureShare": "shares a network among metrics that download theirs",
    "GeneralizedIntersectionOverUnion": "needs torchvision",
    "InfoLM": "downloads a language model",
    "IntersectionOverUnion": "needs torchvision",
    "LearnedPerceptualImagePatchSimilarity": "downloads weights",
    "MeanAveragePrecision": "needs pycocotools",
    "MetricTracker": "no metric: a list of them",
    "NonIntrusiveSpeechQualityAssessment": "downloads weights",
    "PerceptualEvaluationSpeechQuality": "needs pesq",
    "PerceptualPathLength": "takes a generator, and no batches",
    "QualityWithNoReference": "needs torchvision",
    "ShortTimeObjectiveIntelligibility": "needs pystoi",
    "SpatialDistortionIndex": "needs torchvision",
    "SpeechReverberationModulationEnergyRatio": "needs gammatone",
    "VideoMultiMethodAssessmentFusion": "needs vmaf-torch",
}

_KINDS = ("Binary", "Multiclass", "Multilabel")
_ABSTRACT = ("BaseAggregator", "MetricInputTransformer", "CompositionalMetric")


def classes() -> dict[str, type[torchmetrics.Metric]]:
    """Return every public metric class by name."""
    found: dict[str, type[torchmetrics.Metric]] = {}
    for module in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
        if "._" in module.name or ".functional" in module.name:
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ImportError:
            continue
        for name, cls in names.items():
            of_here = inspect.isclass(cls) and cls.__module__ == module.name and issubclass(cls, torchmetrics.Metric)
            if of_here and not name.startswith("_") and not inspect.isabstract(cls):
                found[name] = cls
    return {name: cls for name, cls in sorted(found.items()) if name not in _ABSTRACT}


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


_TEXTS = ["the cat sat here", "a dog ran off", "it rains today", "we go home now"] * 3
_OTHERS = ["the cat sat there", "the dog ran", "it rained all day", "we went home now"] * 3

_Case = tuple[Callable[[], torchmetrics.Metric], tuple[Any, ...], dict[str, Any]]


class _Pixels(torch.nn.Module):
    """A feature network that needs no download."""

    num_features = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(torch.float32).flatten(1)[:, :2] / 255.0


def _of_classification(cls: Any, name: str) -> _Case | None:
    options: dict[str, Any] = {}
    parameters = inspect.signature(cls.__init__).parameters
    for limit in ("min_recall", "min_precision", "min_sensitivity", "min_specificity"):
        if limit in parameters:
            options[limit] = 0.3
    if "beta" in parameters:
        options["beta"] = 2.0
    arguments: tuple[Any, ...]
    if name.startswith("Binary"):
        arguments = (_random(ROWS), _whole(2, ROWS))
    elif name.startswith("Multiclass"):
        options["num_classes"] = 3
        arguments = (_random(ROWS, 3).softmax(-1), _whole(3, ROWS))
        if "average" in parameters:
            options["average"] = "micro" if name == "MulticlassAccuracy" else "macro"
    else:
        options["num_labels"] = 3
        arguments = (_random(ROWS, 3), _whole(2, ROWS, 3))
    if name == "MulticlassExactMatch":
        arguments = (_whole(3, ROWS, 2), _whole(3, ROWS, 2))
    if name in ("BinaryFairness", "BinaryGroupStatRates"):
        options["num_groups"], arguments = 2, (*arguments, torch.arange(ROWS) % 2)
    return (lambda: cls(**options)), arguments, {}


def _of_regression(cls: Any, name: str) -> _Case:
    values = _random(ROWS) + 0.5, _random(ROWS, 1)[:, 0] + 0.4
    if name in ("KLDivergence", "JensenShannonDivergence"):
        return cls, (_random(ROWS, 4).softmax(-1), _random(4, ROWS).T.softmax(-1)), {}
    if name == "CosineSimilarity":
        return cls, (_random(ROWS, 4), _random(4, ROWS).T), {}
    if name == "ContinuousRankedProbabilityScore":
        return cls, (_random(ROWS, 4), _random(ROWS)), {}
    options: dict[str, Any] = {"MinkowskiDistance": {"p": 3}, "CriticalSuccessIndex": {"threshold": 0.8}}.get(name, {})
    return (lambda: cls(**options)), values, {}


def _of_images(cls: Any, name: str) -> _Case:
    images = _random(ROWS, 3, 16, 16), _random(3, ROWS, 16, 16).transpose(0, 1)
    options: dict[str, Any] = {}
    if name in ("FrechetInceptionDistance", "MemorizationInformedFrechetInceptionDistance", "KernelInceptionDistance"):
        options = {"feature": _Pixels(), "normalize": True}
        if name == "KernelInceptionDistance":
            options |= {"subsets": 1, "subset_size": 2, "degree": 1}
        return (lambda: cls(**options)), images[:1], {"real": [True, False]}
    if name == "InceptionScore":
        return (lambda: cls(feature=_Pixels(), splits=1)), images[:1], {}
    if name == "TotalVariation":
        return cls, images[:1], {}
    if name == "MultiScaleStructuralSimilarityIndexMeasure":
        options = {"kernel_size": 3, "betas": (0.5, 0.5), "data_range": 1.0}
    elif name in ("StructuralSimilarityIndexMeasure", "PeakSignalNoiseRatio"):
        options = {"data_range": 1.0}
    elif name == "PeakSignalNoiseRatioWithBlockedEffect":
        options, images = {"data_range": 1.0}, (images[0][:, :1], images[1][:, :1])
    elif name == "VisualInformationFidelity":
        images = (_random(ROWS, 1, 41, 41), _random(1, ROWS, 41, 41).transpose(0, 1))
    return (lambda: cls(**options)), images, {}


def _of_text(cls: Any, name: str) -> _Case:
    if name == "Perplexity":
        return cls, (_random(ROWS, 5, 4), _whole(4, ROWS, 5)), {}
    if name == "SQuAD":
        given = [{"prediction_text": text, "id": str(i)} for i, text in enumerate(_TEXTS)]
        right = [{"answers": {"answer_start": [1], "text": [t]}, "id": str(i)} for i, t in enumerate(_OTHERS)]
        return cls, (given, right), {}
    several = name in ("BLEUScore", "SacreBLEUScore", "CHRFScore", "TranslationEditRate", "ExtendedEditDistance")
    options: dict[str, Any] = {"rouge_keys": ("rouge1", "rougeL")} if name == "ROUGEScore" else {}
    if "n_gram" in inspect.signature(cls.__init__).parameters and name != "CHRFScore":
        options["n_gram"] = 2
    return (lambda: cls(**options)), (_TEXTS, [[text] for text in _OTHERS] if several else _OTHERS), {}


def _of_signals(cls: Any, name: str) -> _Case:
    signals = _random(ROWS, 64), _random(64, ROWS).T.contiguous()
    if name == "PermutationInvariantTraining":
        function = torchmetrics.functional.scale_invariant_signal_noise_ratio
        return (lambda: cls(function)), (_random(ROWS, 2, 64), _random(2, ROWS, 64).transpose(0, 1)), {}
    if name == "SourceAggregatedSignalDistortionRatio":
        return cls, (_random(ROWS, 2, 64), _random(2, ROWS, 64).transpose(0, 1)), {}
    if name == "ComplexScaleInvariantSignalNoiseRatio":
        return cls, (_random(ROWS, 4, 8, 2), _random(4, ROWS, 8, 2).transpose(0, 1)), {}
    return (lambda: cls(filter_length=8) if name == "SignalDistortionRatio" else cls()), signals, {}


def _of_others(cls: Any, name: str, package: str) -> _Case | None:
    labels = _whole(3, ROWS), _whole(3, 1, ROWS)[0]
    if package == "clustering":
        intrinsic = name in ("CalinskiHarabaszScore", "DaviesBouldinScore", "DunnIndex")
        return cls, ((_random(ROWS, 2) if intrinsic else labels[0]), labels[1]), {}
    if package == "nominal":
        if name == "FleissKappa":
            return (lambda: cls(mode="counts")), (torch.tensor([[2, 1, 1], [0, 4, 0], [1, 1, 2]] * 4),), {}
        return (lambda: cls(num_classes=3)), labels, {}
    if package == "retrieval":
        return cls, (_random(ROWS), _whole(2, ROWS)), {"indexes": torch.arange(ROWS) // 4}
    if package == "segmentation":
        maps = _whole(3, ROWS, 8, 8), _whole(3, 8, ROWS, 8).transpose(0, 1)
        return (lambda: cls(num_classes=3, input_format="index")), maps, {}
    if package == "shape":
        return cls, (_random(ROWS, 6, 3), _random(6, ROWS, 3).transpose(0, 1)), {}
    if name == "LipVertexError":
        return (lambda: cls(mouth_map=[0, 1])), (_random(ROWS, 6, 3), _random(6, ROWS, 3).transpose(0, 1)), {}
    if name in ("PanopticQuality", "ModifiedPanopticQuality"):
        maps = _whole(2, ROWS, 4, 4, 2), _whole(2, 4, ROWS, 4, 2).transpose(0, 1)
        return (lambda: cls(things={0}, stuffs={1})), maps, {}
    return None


def _of_wrappers(cls: Any, name: str) -> _Case | None:
    many = (_random(ROWS, 3).softmax(-1), _whole(3, ROWS))
    several = (_random(ROWS, 2), _random(2, ROWS).T.contiguous())
    accuracy = classification.MulticlassAccuracy
    cases: dict[str, _Case] = {
        "ClasswiseWrapper": (lambda: cls(accuracy(3, average=None)), many, {}),
        "MinMaxMetric": (lambda: cls(accuracy(3, average="micro")), many, {}),
        "MultioutputWrapper": (lambda: cls(regression.R2Score(), 2), several, {}),
        "MultitaskWrapper": (
            lambda: cls({"a": accuracy(3, average="micro"), "b": regression.MeanSquaredError()}),
            ({"a": many[0], "b": several[0]}, {"a": many[1], "b": several[1]}),
            {},
        ),
        "Running": (lambda: cls(regression.MeanSquaredError(), window=5), several, {}),
        "LambdaInputTransformer": (lambda: cls(regression.MeanSquaredError(), lambda preds: 2 * preds), several, {}),
        "BinaryTargetTransformer": (
            lambda: cls(retrieval.RetrievalMRR(), threshold=1),
            (_random(ROWS), _whole(3, ROWS)),
            {"indexes": torch.arange(ROWS) // 4},
        ),
    }
    return cases.get(name)


def case_of(name: str, cls: Any) -> _Case | None:
    """Return a function that makes a metric and its arguments, or None if there is no case."""
    package = cls.__module__.split(".")[1]
    if package == "classification":
        if name.startswith(_KINDS):
            return _of_classification(cls, name)
        # A factory class, whose constructor returns an object of another class.
        return None
    if package == "aggregation":
        return cls, (_random(ROWS),), {}
    of: dict[str, Callable[[Any, str], _Case | None]] = {
        "regression": _of_regression,
        "image": _of_images,
        "text": _of_text,
        "audio": _of_signals,
        "wrappers": _of_wrappers,
    }
    return of[package](cls, name) if package in of else _of_others(cls, name, package)


def _part(value: Any, start: int, stop: int, number: int) -> Any:
    if isinstance(value, dict):
        return {key: _part(each, start, stop, number) for key, each in value.items()}
    if isinstance(value, list) and isinstance(value[0], bool):
        return value[number % len(value)]  # a flag that differs between batches
    return value[start:stop]


def _batches(sizes: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Return the bounds of each replica's slice, batch by batch."""
    first = 0
    for counts in sizes:
        bounds = []
        for count in counts:
            bounds.append((first, first + count))
            first += count
        yield bounds


SIZES = {
    "uneven slices, one empty at first, one at the end": [(0, 3), (3, 2), (1, 2), (1, 0)],
    "a replica without any row": [(0, 6), (0, 6)],
}


def walk(strategy: Any, rank: int) -> dict[str, str]:
    """Return the reasons, by name, of metrics whose value differs from one replica's."""
    wrong: dict[str, str] = {}
    cases: dict[str, _Case] = {}
    for name, cls in classes().items():
        case = None if name in LEFT_OUT else case_of(name, cls)
        if case is not None:
            cases[name] = case
        elif name not in LEFT_OUT and not issubclass(cls, classification.base._ClassificationTaskWrapper):
            wrong[name] = "no case"
    for label, sizes in SIZES.items():
        with strategy.scope():  # in one call of run, because communication takes time
            metrics = {name: make() for name, (make, _, _) in cases.items()}
        alone = {name: make() for name, (make, _, _) in cases.items()}
        for each in (part for metric in alone.values() for part in metric.modules()):
            each.distributed_available_fn = bool  # type: ignore[union-attr]
        strategy.run(_update_all, (metrics, alone, cases, sizes, rank, wrong))
        for name in sorted(cases.keys() - wrong.keys()):
            try:
                _compare(metrics[name], alone[name])
            except Exception as error:
                wrong[name] = f"{label}: {type(error).__name__}: {error}"
    return wrong


def _update_all(
    metrics: dict[str, Any],
    alone: dict[str, Any],
    cases: dict[str, _Case],
    sizes: Any,
    rank: int,
    wrong: dict[str, str],
) -> None:
    """Update each metric with this replica's slices, and its copy with whole batches."""
    for name, (_, arguments, named) in cases.items():
        try:
            for number, bounds in enumerate(_batches(sizes)):
                for target, (start, stop) in (
                    (metrics[name], bounds[rank]),
                    (alone[name], (bounds[0][0], bounds[-1][1])),
                ):
                    target.update(
                        *(_part(each, start, stop, number) for each in arguments),
                        **{key: _part(each, start, stop, number) for key, each in named.items()},
                    )
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"


def _compare(metric: Any, alone: Any) -> None:
    wanted, got = _leaves(alone.compute()), _leaves(metric.compute())
    if isinstance(alone, torchmetrics.CatMetric):  # replica by replica
        wanted, got = [wanted[0].sort().values], [got[0].sort().values]
    assert len(wanted) == len(got), (wanted, got)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [torch.as_tensor(value)]
