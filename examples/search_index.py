"""Image search with FAISS: attacked queries miss their photo, and defended embeddings find it again.

    python examples/search_index.py                 # eight photos that scikit-image bundles
    python examples/search_index.py holiday/*.jpg   # your own

The index holds one embedding per photo. A query is a photo of the index, cut a little and mirrored, so that it is not
the same picture. Recall@1 is the share of queries whose nearest neighbour in the index is the photo they come from. The
attack is PGD on plain CLIP: it moves the feature of a query away from that of its photo, towards that of another one.
It does not know the defence; an attacker who does can defeat it.
"""

import argparse
from pathlib import Path

import faiss
import numpy as np
import torch
from PIL import Image, ImageOps
from skimage import data

import react_clip as rc
from react_clip.preprocess import read_image

BUNDLED = (data.astronaut, data.brick, data.camera, data.chelsea, data.coffee, data.coins, data.moon, data.rocket)


def main() -> None:
    """Print recall@1 of plain and defended embeddings, for clean and for attacked queries."""
    parser = argparse.ArgumentParser(description="Recall of an image search before and after an attack.")
    parser.add_argument("photos", nargs="*", type=Path, help="image files, at least two (bundled ones by default)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    parser.add_argument("--eps", type=float, default=4, help="largest change of a pixel, in 255ths (%(default)s)")
    args = parser.parse_args()

    clip = rc.load("clip-vit-b-16")
    images = [read_image(path) for path in args.photos] or [Image.fromarray(photo()) for photo in BUNDLED]
    photos, queries = clip.prepare(images), clip.prepare([cut_and_mirror(image) for image in images])
    attacked = attack(clip, photos, queries, rc.attacks.PGD(eps=args.eps / 255, steps=args.steps, loss="margin"))

    print(f"recall@1 of {len(images)} photos   clean queries   attacked queries ({args.eps:g}/255)")
    for name, defense in {"plain": rc.Undefended(), "defended": rc.SecondLook.for_encoder(clip)}.items():
        index = faiss.IndexFlatIP(clip.dim)  # unit features: the inner product is the cosine
        index.add(embed(clip, defense, photos))
        clean, after = (recall(index, embed(clip, defense, pixels)) for pixels in (queries, attacked))
        print(f"{name:<10}{clean:>27.0%}{after:>19.0%}")


def cut_and_mirror(image: Image.Image) -> Image.Image:
    """The photo without a tenth of its width and height at each side, mirrored."""
    return ImageOps.mirror(ImageOps.crop(image, border=(image.width // 10, image.height // 10)))


def embed(clip: rc.Encoder, defense: rc.defenses.Defense, pixels: torch.Tensor) -> np.ndarray:
    """Unit features ``[N, dim]`` of pixels ``[N, 3, S, S]``, for the index."""
    return defense.run(clip, pixels, 0).features.cpu().numpy()  # a search has no classes: features alone decide


def attack(clip: rc.Encoder, photos: torch.Tensor, queries: torch.Tensor, pgd: rc.attacks.PGD) -> torch.Tensor:
    """Queries changed so that plain CLIP finds another photo: every photo of the index is a class of its own."""
    names = [f"photo {number}" for number in range(len(photos))]
    clf = rc.ZeroShotClassifier.from_features(clip, names, clip(photos))
    return pgd(clf, queries, torch.arange(len(queries)), seed=0).images


def recall(index: faiss.Index, queries: np.ndarray) -> float:
    """Share of queries whose nearest neighbour is the photo with the same number."""
    _, nearest = index.search(queries, 1)
    return float((nearest[:, 0] == np.arange(len(queries))).mean())


if __name__ == "__main__":
    main()
