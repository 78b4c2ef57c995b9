"""A small hub on this machine, which the real client talks to, and heads to publish."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from decode import Target
from heads import HeadNotes, create_head, head_class, save_head
from train.new_head import target_sizes

NOTES = HeadNotes(
    training={
        "data.source": "/home/jane/secret/answers.jsonl",
        "data.eval_prompts": ["/home/jane/chat.jsonl", "someone/prompts"],
        "data.limit": None,
        "optim.lr": 0.003,
        "optim.epochs": 2.0,
        "vocabulary": {"size": 5, "coverage": 0.94666},
    },
    measured={
        "chain/tokens_per_step": 1.5,
        "tokens_per_step": 2.3661,
        "tokens_per_step_low": 2.0655,
        "tokens_per_step_high": 2.7096,
        "speedup": 1.3566,
        "accept_rate/depth1": 0.7156,
        "accept_rate/depth2": 0.5405,
        "accept_rate/depth2_low": 0.4294,
        "accept_rate/depth2_high": 0.6403,
        "t0.7/tokens_per_step": 1.7,
        "mismatches": 0.0,
    },
    tree={"depth": 3, "width": 2, "size": 6},
)


class Hub(ThreadingHTTPServer):
    """Repositories in memory, with what the client of the hub asks for; `refuse` is a status to answer writes with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, SimpleNamespace] = {}
        self.refuse: int | None = None
        self.checked: list[str] = []
        self.asked = 0

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False) -> SimpleNamespace:
        self.repos[name] = repo = SimpleNamespace(private=private, commits=[{".gitattributes": b"", **files}], said=[])
        return repo

    def files(self, name: str) -> dict[str, bytes]:
        return self.repos[name].commits[-1]


def sha(commit: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(commit.items())).encode()).hexdigest()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args) -> None:
        self.server.asked += 1

    def answer(self, content, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].split("/")[1:]
        api = path[:2] == ["api", "models"]
        name = "/".join(path[2:4] if api else path[:2])
        if name not in self.server.repos:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        repo = self.server.repos[name]
        commit = next((found for found in repo.commits if sha(found) in path), repo.commits[-1])
        if api and path[4:5] == ["tree"]:
            found = [{"type": "file", "path": p, "size": len(c), "oid": sha({p: c})} for p, c in commit.items()]
            return self.answer(found)
        if api:
            card = commit.get("README.md", b"").decode().split("---\n")
            data = {"cardData": yaml.safe_load(card[1])} if len(card) > 2 else {}
            siblings = [{"rfilename": file} for file in commit]
            return self.answer({"id": name, "sha": sha(commit), "private": repo.private, "siblings": siblings, **data})
        file = "/".join(path[4:])  # USER/NAME/resolve/SHA/...
        return self.answer(commit[file], ETag=f'"{sha({file: commit[file]})}"', X_Repo_Commit=sha(commit))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, path = self.server, self.path.partition("?")[0].split("/")[1:]
        if hub.refuse is not None:
            return self.answer({"error": "no"}, hub.refuse)
        if path == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            taken = name in hub.repos
            if not taken:
                hub.add(name, {}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
            return self.answer({"url": f"{hub.url}/{name}"}, 409 if taken else 200)
        if path == ["api", "validate-yaml"]:
            hub.checked.append(json.loads(body)["content"])
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path[2:4])
        if path[4] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        return self.commit(name, [json.loads(line) for line in body.splitlines()])

    def commit(self, name: str, lines: list[dict]) -> None:
        repo = self.server.repos[name]
        after = dict(repo.commits[-1])
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit") != sha(repo.commits[-1]):
                    return self.answer({"error": "changed"}, 412)
                repo.said.append(value["summary"])
            elif line["key"] == "deletedFile":
                del after[value["path"]]
            else:
                after[value["path"]] = base64.b64decode(value["content"])
        repo.commits.append(after)
        return self.answer({"commitUrl": f"{self.server.url}/{name}/commit/x", "commitOid": sha(after)})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The client asks this hub, and keeps what it downloads in the test's folder."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", server.url)
    monkeypatch.setattr(
        f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def model(make_tiny_llama, tiny_tokenizer, tmp_path_factory) -> Path:
    """The folder of a target of four layers."""
    folder = tmp_path_factory.mktemp("models") / "tiny-target"
    config = make_tiny_llama().config
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def target(model) -> Target:
    return Target.from_pretrained(str(model), dtype="float32")


@pytest.fixture
def make_head(target, tmp_path):
    """Write a head folder of random weights."""

    def make(
        kind: str = "medusa", *, name: str = "", target_name: str = "", notes=NOTES, seed: int = 1, **options
    ) -> Path:
        config = head_class(kind).Config
        if kind == "eagle3":
            options.setdefault("feature_layers", (2, 3, 4))
        head = create_head(kind, config(**options, **target_sizes(target, config)), target)
        if head.vocabulary is not None:
            head.set_vocabulary(torch.tensor([3, 9, 27, 81, 243]))
        torch.manual_seed(seed)
        for parameter in head.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
        folder = tmp_path / (name or f"my-{kind}")
        recorded = SimpleNamespace(name=target_name or target.name, fingerprint=target.fingerprint, quantize=None)
        save_head(head, folder, target=recorded, notes=notes)
        return folder

    return make
