"""A process that is forked after the model has computed says so instead of hanging."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

import react_clip as rc
from toys import patch_encoder


def _call(encoder: rc.Encoder, pixels: torch.Tensor, answers: Any) -> None:
    try:
        encoder(pixels)
        answers.put("computed")
    except rc.ReactClipError as error:
        answers.put(str(error))


@pytest.mark.process
def test_a_forked_process_is_refused_in_one_line() -> None:
    encoder = patch_encoder()
    pixels = torch.rand(64, 3, encoder.image_size, encoder.image_size)
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    try:
        torch.set_num_threads(2)
        encoder(pixels)
        process = context.Process(target=_call, args=(encoder, pixels, answers))
        process.start()
        said = answers.get(timeout=60)
        process.join()
    finally:
        torch.set_num_threads(threads)
    assert said.startswith("this process was forked after an encoder had computed")
    assert "get_context('spawn')" in said
