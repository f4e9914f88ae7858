"""The 17 sets of the paper: twelve downstream ones, ImageNet and its four variants.

Class names and prompts are those of the TTC line of work, which the paper adopts (CLIP's tokenizer ignores case).
"""

from __future__ import annotations

from react_clip.data.spec import DatasetSpec
from react_clip.errors import ReactClipError

_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"

_DOWNSTREAM = (
    DatasetSpec(
        "cifar10",
        "CIFAR10",
        classes=10,
        test_images=10_000,
        group="downstream",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        official_splits=("test", "train"),
        torchvision="CIFAR10",
    ),
    DatasetSpec(
        "cifar100",
        "CIFAR100",
        classes=100,
        test_images=10_000,
        group="downstream",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        official_splits=("test", "train"),
        torchvision="CIFAR100",
    ),
    DatasetSpec(
        "stl10",
        "STL10",
        classes=10,
        test_images=8_000,
        group="downstream",
        page="https://cs.stanford.edu/~acoates/stl10/",
        official_splits=("test", "train"),
        torchvision="STL10",
    ),
    DatasetSpec(
        "dtd",
        "DTD",
        classes=47,
        test_images=1_880,
        group="downstream",
        page=f"{_OXFORD}/dtd/",
        split="test, partition 1",
        templates=("A surface with a {} texture.",),
        official_splits=("test", "train", "val"),
        torchvision="DTD",
    ),
    DatasetSpec(
        "oxford_pets",
        "OxfordPets",
        classes=37,
        test_images=3_669,
        group="downstream",
        page=f"{_OXFORD}/pets/",
        templates=("A photo of a {}, a type of pet.",),
        official_splits=("test", "train"),
        torchvision="OxfordIIITPet",
    ),
    DatasetSpec(
        "flowers102",
        "Flowers102",
        classes=102,
        test_images=6_149,
        group="downstream",
        page=f"{_OXFORD}/flowers/102/",
        templates=("A photo of a {}, a type of flower.",),
        official_splits=("test", "train", "val"),
        torchvision="Flowers102",
    ),
    DatasetSpec(
        "fgvc_aircraft",
        "FGVC-Aircraft",
        classes=100,
        test_images=3_333,
        group="downstream",
        page=f"{_OXFORD}/fgvc-aircraft/",
        split="test, variants",
        templates=("A photo of a {}, a type of aircraft.",),
        official_splits=("test", "train", "val"),
        torchvision="FGVCAircraft",
    ),
    DatasetSpec(
        "stanford_cars",
        "StanfordCars",
        classes=196,
        test_images=8_041,
        group="downstream",
        # The authors' links are dead, so torchvision only reads a copy laid out as this page says.
        page="https://github.com/pytorch/vision/issues/7545#issuecomment-1631441616",
        templates=("A photo of a {}.",),
        official_splits=("test", "train"),
        torchvision="StanfordCars",
        hub="clip-benchmark/wds_cars",
    ),
    DatasetSpec(
        "caltech101",
        "Caltech101",
        classes=101,
        test_images=8_677,
        group="downstream",
        page="https://data.caltech.edu/records/mzrjq-6wc02",
        split="all images",
        torchvision="Caltech101",
        directories=("caltech101/101_ObjectCategories",),
        ignored=("BACKGROUND_Google",),
    ),
    DatasetSpec(
        "caltech256",
        "Caltech256",
        classes=257,
        test_images=30_607,
        group="downstream",
        page="https://data.caltech.edu/records/nyy15-4j048",
        split="all images",
        templates=("A photo of a {}.",),
        torchvision="Caltech256",
        directories=("caltech256/256_ObjectCategories",),
    ),
    DatasetSpec(
        "food101",
        "Food101",
        classes=101,
        test_images=25_250,
        group="downstream",
        page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        templates=("A photo of {}, a type of food.",),
        official_splits=("test", "train"),
        torchvision="Food101",
    ),
    DatasetSpec(
        "eurosat",
        "EuroSAT",
        classes=10,
        test_images=27_000,
        group="downstream",
        page="https://github.com/phelber/EuroSAT",
        split="all images",
        templates=("A centered satellite photo of {}.",),
        torchvision="EuroSAT",
        directories=("eurosat/2750",),
    ),
)

_IMAGENET = (
    DatasetSpec(
        "imagenet",
        "ImageNet",
        classes=1000,
        test_images=5_000,
        group="imagenet",
        page="https://image-net.org/download-images.php",
        split="validation, 5 per class",
        per_class=5,
        directories=("imagenet/val",),
        hub="ILSVRC/imagenet-1k",
        hub_split="validation",
        # The licence has to be accepted by a person, once, before the command works.
        archive="hf download ILSVRC/imagenet-1k --repo-type dataset --include 'data/validation*' "
        "--local-dir '{root}/imagenet' after accepting https://huggingface.co/datasets/ILSVRC/imagenet-1k and "
        "`hf auth login`, or unpack the validation photos into {root}/imagenet/val/<WordNet id>/",
    ),
    DatasetSpec(
        "imagenet_a",
        "ImageNet-A",
        classes=200,
        test_images=1_000,
        group="imagenet",
        page="https://github.com/hendrycks/natural-adv-examples",
        split="all images, 5 per class",
        per_class=5,
        directories=("imagenet-a",),
        hub="clip-benchmark/wds_imagenet-a",
        archive=f"mkdir -p '{{root}}' && curl -L {_HENDRYCKS}/imagenet-a.tar | tar -x -C '{{root}}'",
    ),
    DatasetSpec(
        "imagenet_v2",
        "ImageNet-V2",
        classes=1000,
        test_images=5_000,
        group="imagenet",
        page="https://github.com/modestyachts/ImageNetV2",
        split="matched frequency, 5 per class",
        per_class=5,
        directories=("imagenetv2-matched-frequency-format-val",),
        hub="clip-benchmark/wds_imagenetv2",
        archive="mkdir -p '{root}' && curl -L https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/"
        "imagenetv2-matched-frequency.tar.gz | tar -xz -C '{root}'",
        class_list="imagenet",
        numbered=True,
    ),
    DatasetSpec(
        "imagenet_r",
        "ImageNet-R",
        classes=200,
        test_images=1_000,
        group="imagenet",
        page="https://github.com/hendrycks/imagenet-r",
        split="all images, 5 per class",
        per_class=5,
        directories=("imagenet-r",),
        hub="clip-benchmark/wds_imagenet-r",
        archive=f"mkdir -p '{{root}}' && curl -L {_HENDRYCKS}/imagenet-r.tar | tar -x -C '{{root}}'",
    ),
    DatasetSpec(
        "imagenet_sketch",
        "ImageNet-Sketch",
        classes=1000,
        test_images=5_000,
        group="imagenet",
        page="https://github.com/HaohanWang/ImageNet-Sketch",
        split="all images, 5 per class",
        per_class=5,
        directories=("sketch",),
        hub="clip-benchmark/wds_imagenet_sketch",
        archive="mkdir -p '{root}' && curl -L -o '{root}/sketch.zip' https://huggingface.co/datasets/songweig/"
        "imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip && unzip -q '{root}/sketch.zip' -d '{root}'",
        class_list="imagenet",
    ),
)

REGISTRY: dict[str, DatasetSpec] = {spec.name: spec for spec in (*_DOWNSTREAM, *_IMAGENET)}


def names() -> list[str]:
    """The names of the paper's 17 sets, the downstream ones first.

    >>> len(names()), names()[0], names()[-1]
    (17, 'cifar10', 'imagenet_sketch')
    """
    return list(REGISTRY)


def get(name: str) -> DatasetSpec:
    """What the registry knows about a set.

    >>> get("eurosat").classes, get("eurosat").test_images, get("eurosat").templates
    (10, 27000, ('A centered satellite photo of {}.',))
    """
    try:
        return REGISTRY[name]
    except KeyError:
        raise ReactClipError(f"data set {name!r} is not known; it is one of {', '.join(REGISTRY)}") from None
