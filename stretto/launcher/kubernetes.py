"""Manifests of a run on Kubernetes: a head, which launches the run, and a worker in each pod of an indexed job.

The head has the secret of the run, the workers have a key that is good for joining. The script is in the image; workers
receive the code from the head.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2
import msgspec
from msgspec.structs import replace

from stretto.errors import LaunchError, explain
from stretto.launcher import entry
from stretto.launcher.join import JOIN_KEY, JoinKey
from stretto.run_config import RunConfig, options, typed_options

PORT = 7878
KEYS = "/var/run/stretto"
"""Folder of the keys in the pods."""
SECRET = "secret"
GRACE_S, LAST_S = 60, 15
"""Time between SIGTERM and SIGKILL, and the part of it that is left when the workers have left."""
TEMPLATE = """\
apiVersion: v1
kind: Secret
metadata: {name: {{ name }}-head}
stringData: {{ {secret_file: secret} | tojson }}
---
apiVersion: v1
kind: Secret
metadata: {name: {{ name }}-worker}
stringData: {{ {key_file: key} | tojson }}
---
apiVersion: v1
kind: Service
metadata: {name: {{ name }}-head}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {stretto-run: {{ name }}, stretto-role: head}
  ports: [{name: coordinator, port: {{ port }}}]
{% for role, command in (("head", head), ("worker", worker)) %}
---
apiVersion: batch/v1
kind: Job
metadata: {name: {{ name }}-{{ role }}}
spec:
{% if role == "worker" %}
  completionMode: Indexed
  completions: {{ workers }}
  parallelism: {{ workers }}
  backoffLimit: {{ restarts }}
{% else %}
  backoffLimit: 0
{% endif %}
  template:
    metadata:
      labels: {stretto-run: {{ name }}, stretto-role: {{ role }}}
    spec:
      restartPolicy: {{ "OnFailure" if role == "worker" else "Never" }}
      terminationGracePeriodSeconds: {{ grace_s }}
      containers:
        - name: stretto
          image: {{ image | tojson }}
          command: {{ command | tojson }}
          env:
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
          resources:
            requests: {{ requests[role] | tojson }}
            limits: {{ limits[role] | tojson }}
          volumeMounts:
            - {name: key, mountPath: {{ keys }}, readOnly: true}
      volumes:
        - name: key
          secret: {secretName: {{ name }}-{{ role }}, defaultMode: 256}
{% endfor %}
"""
"""Manifests; 256 is the mode 0400."""


@dataclass(frozen=True)
class PodOptions:
    """Image of the pods, name of the run, and resources of each worker."""

    image: str
    name: str
    gpus: int = 0
    processors: str = "1"
    memory: str = "4Gi"


@dataclass(frozen=True)
class Commands:
    """Commands of the head and of a worker, as lists of words, and the content of their key files."""

    head: Sequence[str]
    worker: Sequence[str]
    secret: str = field(repr=False)
    key: str = field(repr=False)


def commands(config: RunConfig, address: str, listen: str, keys: str = KEYS) -> Commands:
    """Return the commands of a run whose head listens at `listen` and is reached at `address`, with new keys."""
    from stretto.security import RunKeys  # imports zmq

    secret = secrets.token_hex(32)
    pair = RunKeys(secret).client(b"joining").texts
    if config.checkpoints is not None and not config.stop_within_s:
        config = replace(config, stop_within_s=GRACE_S - LAST_S)
    typed = typed_options(config, [name for name in options() if name not in ("workers", "module")])
    program = entry.typed(config.script, config.module, config.args)
    head = ["stretto", "run", "-n", "0", "--listen", listen, "--secret-file", f"{keys}/{SECRET}", *typed, *program]
    worker = ["stretto", "join", address, "--key", f"{keys}/{JOIN_KEY}", "--restarts", str(config.restarts)]
    return Commands(head, worker, secret, msgspec.json.encode(JoinKey(address, pair)).decode())


def manifests(config: RunConfig, pods: PodOptions) -> str:
    """Return the manifests of a run with this many workers. Raises LaunchError for a name that Kubernetes refuses."""
    if not _is_name(pods.name):
        problem, expected = f"{pods.name} is no name for objects of Kubernetes", "lower-case letters, digits and -"
        raise LaunchError(explain(problem, got=f"--name {pods.name}", expected=expected, to_type="--name my-run"))
    listen = f"$(POD_IP):{PORT}"
    run = commands(config, f"{pods.name}-head:{PORT}", listen)
    # Kubernetes would expand $(NAME)
    words = [word if word == listen else word.replace("$", "$$") for word in run.head]
    worker = {"cpu": pods.processors, "memory": pods.memory}
    gpus = {"nvidia.com/gpu": pods.gpus} if pods.gpus else {}
    head = {"cpu": "1", "memory": "2Gi"}
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        name=pods.name, image=pods.image, port=PORT, keys=KEYS, grace_s=GRACE_S, workers=config.workers,
        restarts=config.restarts * config.workers, head=words, worker=run.worker,
        secret_file=SECRET, secret=run.secret, key_file=JOIN_KEY, key=run.key,
        requests={"head": head, "worker": worker | gpus},
        limits={"head": {"memory": "2Gi"}, "worker": {"memory": pods.memory} | gpus},
    )  # fmt: skip


def _is_name(name: str) -> bool:
    letters = name.replace("-", "")
    is_plain = letters.isascii() and letters.isalnum() and letters == letters.lower()
    return is_plain and name[0].isalpha() and not name.endswith("-") and len(name) <= 50
