"""Sequences that share passes: each gets what it would get alone, whoever joins or leaves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_causal_lm

from decodescope.batching import forward_together
from decodescope.generate import Decoding, Limits
from decodescope.sampling.params import SamplingParams
from decodescope.sampling.sampler import Sampler
