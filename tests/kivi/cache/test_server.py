"""The real mlx_lm.server, over HTTP, on packed caches."""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import mlx.core as mx
import pytest
from mlx_lm import server
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.utils import load

from kivi import BatchKIVICache, CacheSpec, KIVICache, RoundTripKIVICache, install, make_prompt_cache

SPEC = CacheSpec(key_bits=4, value_bits=4, residual_length=16, backend="mlx")
ROUND_TRIP = CacheSpec(kind="kivi-roundtrip", key_bits=4, value_bits=4, residual_length=16, backend="mlx")
PREFIX = [(5 * i * i + i) % 90 for i in range(120)]
TAILS = [[1, 2, 3, 4], [50, 51, 52], [70] * 9]


def words(tokens):
    return " ".join(f"w{token}" for token in tokens)


class Provider(server.ModelProvider):
    """mlx-lm's provider in this process, for a look into its store: the model gets its caches as soon as it is loaded."""

    def __init__(self, arguments, spec):
        self.spec = spec
        self.installation = None
        super().__init__(arguments)

    def _load(self, *key):
        super()._load(*key)
        self.installation = install(self.model, self.spec)
        self.is_batchable = all(hasattr(cache, "merge") for cache in self.model.make_cache())


@pytest.fixture
def spec():
    return SPEC


@pytest.fixture
def running(model_folder, spec, monkeypatch):
    """Start the server on a free port; yield its address and its store of prompt caches."""
    providers = queue.Queue()
    monkeypatch.setattr("sys.argv", ["mlx_lm.server", "--model", str(model_folder), "--log-level", "ERROR"])
    monkeypatch.setattr(server, "run", lambda *args: providers.put(args[-1]))
    server.main()  # as on the command line, as far as the parsed arguments
    servers = queue.Queue()

    class Server(ThreadingHTTPServer):
        def server_activate(self):
            super().server_activate()
            servers.put(self)

    provider = Provider(providers.get_nowait().cli_args, spec)
    prompt_caches = LRUPromptCache(10)
    generator = server.ResponseGenerator(provider, prompt_caches)
    thread = threading.Thread(target=server._run_http_server, args=("127.0.0.1", 0, generator, Server))
    thread.start()
    http = servers.get(timeout=60)
    yield f"http://127.0.0.1:{http.server_port}", prompt_caches
    http.shutdown()
    http.server_close()
    thread.join()
    generator.stop_and_join()
    provider.installation.undo()


def complete(address, tokens, max_tokens=24):
    body = json.dumps({"prompt": words(tokens), "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        return json.load(response)


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_requests_are_served_from_packed_caches_alone_reused_and_batched(running, model_folder, monkeypatch):
    address, prompt_caches = running
    batch_sizes = []
    update_and_fetch = BatchKIVICache.update_and_fetch

    def watched(cache, keys, values):
        batch_sizes.append(keys.shape[0])
        return update_and_fetch(cache, keys, values)

    monkeypatch.setattr(BatchKIVICache, "update_and_fetch", watched)

    first = complete(address, PREFIX + TAILS[0])
    model, tokenizer = load(str(model_folder))
    prompt = mx.array(PREFIX + TAILS[0])
    steps = generate_step(prompt, model, max_tokens=24, prompt_cache=make_prompt_cache(model, SPEC))
    assert first["choices"][0]["text"].strip() == tokenizer.decode([token for token, _ in steps]).strip()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    second = complete(address, PREFIX + TAILS[1])  # trimmed to the common prefix, into the codes
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PREFIX)
    assert second["usage"]["completion_tokens"] == 24

    assert set(batch_sizes) == {1}
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda tail: complete(address, PREFIX[:60] + tail, max_tokens=150), TAILS))
    assert [answer["usage"]["completion_tokens"] for answer in together] == [150] * 3
    assert max(batch_sizes) > 1

    entries = [prompt_caches._trie.get(key, tokens) for lru in prompt_caches._lru._lrus.values() for key, tokens in lru]
    assert len(entries) >= 4
    for entry in entries:
        assert {type(cache) for cache in entry.prompt_cache} == {KIVICache}
        assert all(cache.frontier > 0 for cache in entry.prompt_cache)
        assert all(cache.bytes().is_honest for cache in entry.prompt_cache)


@pytest.mark.parametrize("spec", [ROUND_TRIP])
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_the_round_trip_cache_is_served_one_request_at_a_time(running, model_folder, spec):
    address, prompt_caches = running
    model, tokenizer = load(str(model_folder))
    for cached, tail in ((0, TAILS[0]), (len(PREFIX), TAILS[1])):
        answer = complete(address, PREFIX + tail)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert answer["usage"]["completion_tokens"] == 24
        if not cached:
            steps = generate_step(mx.array(PREFIX + tail), model, max_tokens=24, prompt_cache=make_prompt_cache(model, spec))
            assert answer["choices"][0]["text"].strip() == tokenizer.decode([token for token, _ in steps]).strip()
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda tail: complete(address, PREFIX[:60] + tail), TAILS))
    assert [answer["usage"]["completion_tokens"] for answer in together] == [24] * 3
    entries = [prompt_caches._trie.get(key, tokens) for lru in prompt_caches._lru._lrus.values() for key, tokens in lru]
    assert {type(cache) for entry in entries for cache in entry.prompt_cache} == {RoundTripKIVICache}
