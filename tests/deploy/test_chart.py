"""Chart tests: the rendered chart is valid for Kubernetes, understood by the roles, and equal to the reviewed files."""

import copy
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deploy.generate import CHART, generated
from rose.pipeline.cli.main import app
from rose.topics.admin import expected_settings
from rose.topics.catalog import CATALOG, Retention
from tests.deploy.chart_fixtures import (
    GOLDEN,
    RELEASE,
    VALUES,
    Resource,
    Values,
    containers,
    rendered,
    resources,
    values_of,
)
from tests.deploy.command_lines import configured, parsed

pytestmark = pytest.mark.skipif(
    # not imported here, because Helm's threads would not survive the fork of the test processes
    find_spec("helm_python") is None,
    reason="helm-python-sdk is not installed: pip install 'rose-rollouts[chart]'",
)
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: pip install 'rose-rollouts[chart]'"
)

OLDEST, NEWEST = "1.30", "1.37"
"""Kubernetes versions that the chart supports."""

OF_OTHERS = {
    "KafkaTopic": ("kafka.strimzi.io/v1", {"topicName", "partitions", "replicas", "config"}),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"},
    ),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector", "podMetricsEndpoints"}),
}
"""Resources without a schema from Kubernetes: their versions and the fields of `spec`, from their documentation."""

POD = "rl-executor-5d9c-x7k2p"

NAMES = [path.stem for path in VALUES]
EVERY = [pytest.param(name, marks=[] if name == "minimal" else pytest.mark.long) for name in NAMES]


@pytest.mark.parametrize("name", EVERY)
def test_rendered_chart_equals_the_golden_files_and_is_valid_for_kubernetes(name: str) -> None:
    text = rendered(values_of(name))
    assert text == (GOLDEN / f"{name}.yaml").read_text(), "read the diff, then: python -m tests.deploy.chart_fixtures"
    for each in resources(text):
        if each["kind"] in OF_OTHERS:
            version, fields = OF_OTHERS[each["kind"]]
            assert each["apiVersion"] == version and set(each["spec"]) == fields
            continue
        for kubernetes in (OLDEST, NEWEST):
            kubernetes_validate.validate(each, kubernetes, strict=True)


def test_each_of_five_values_files_has_a_golden_render() -> None:
    assert NAMES == ["bring-your-own-kafka", "lenders", "minimal", "production", "strimzi"]
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == NAMES


def test_generated_files_are_up_to_date() -> None:
    for path, text in generated().items():
        assert path.read_text() == text, f"{path.name} is not what the code says: python -m deploy.generate"


@pytest.mark.parametrize("name", EVERY)
def test_every_command_line_and_setting_is_known_to_rose(name: str, tmp_path: Path) -> None:
    found = resources(rendered(values_of(name)))
    (toml,) = [each["data"]["rose.toml"] for each in found if each["kind"] == "ConfigMap"]
    lines = [one for one in containers(found) if one["name"] != "rose"]
    assert lines
    for one in lines:
        values_by_name = {each["name"]: value_of(each) for each in one["env"]}
        arguments = [word.replace("$(ORDINAL)", "3") for word in one["args"]]
        arguments = [tmp_path.as_posix() if word == "/etc/rose/kafka/client.properties" else word for word in arguments]
        config = configured(arguments, values_by_name, toml, tmp_path)
        assert config.bus().bootstrap == values_of(name)["kafka"]["bootstrapServer"]
        if one["name"] != "topics":
            assert config.settings.metrics.port == one["ports"][-1]["containerPort"]
        if one["name"] == "control":
            assert config.settings.control.page_port == one["ports"][0]["containerPort"]
        if one["name"] in ("executor", "server"):
            assert (config.settings.executor.name, config.settings.executor.slot) == (POD, None)
        if one["name"] == "server":
            assert outlives_its_container(config.run_folder, one)


@pytest.mark.parametrize("name", EVERY)
def test_secured_chart_gives_credentials_to_all_clients_and_keys_where_needed(name: str) -> None:
    found = [one for one in containers(resources(rendered(values_of(name)))) if one["name"] != "rose"]
    sign_in = [one for one in found if "--command-config" in one["args"]]
    assert sign_in in ([], found)
    for one in sign_in:
        if one["name"] in ("executor", "trainer", "server"):
            assert {"ROSE_WEIGHTS__TRUSTED_KEY", "ROSE_WEIGHTS__SIGNING_KEY"} & {each["name"] for each in one["env"]}


def test_large_number_reaches_the_client_with_all_its_digits() -> None:
    """librdkafka reads 1.048576e+06 as 1."""
    properties = {"socket.receive.buffer.bytes": 1048576, "client.rack": "a", "enable.sparse.connections": True}
    found = containers(resources(rendered(changed(values_of("minimal"), "kafka.properties", properties))))
    assignments = {word for one in found for word in one["args"] if "=" in word}
    assert assignments >= {"socket.receive.buffer.bytes=1048576", "client.rack=a", "enable.sparse.connections=true"}


def test_terminating_lender_stops_lending_first_and_its_next_start_lends(tmp_path: Path) -> None:
    server = of_kind("StatefulSet", values_of("lenders"), "lender")["spec"]["template"]["spec"]["containers"][0]
    (assignments,) = (each["value"] for each in server["env"] if each["name"] == "ROSE_LENDER__STOP_FILE")
    assert assignments == "/tmp/runs/$(ROSE_EXECUTOR__NAME).stop"
    folder = tmp_path / "runs"
    (stop, begin) = (
        [word.replace("sleep 10", "sleep 0") for word in server["lifecycle"][moment]["exec"]["command"]]
        for moment in ("preStop", "postStart")
    )
    variables = {"ROSE_LENDER__STOP_FILE": str(folder / f"{POD}.stop"), "PATH": os.environ["PATH"]}
    subprocess.run(begin, env=variables, check=True)
    subprocess.run(stop, env=variables, check=True)
    assert (folder / f"{POD}.stop").exists()
    subprocess.run(begin, env=variables, check=True)
    assert not (folder / f"{POD}.stop").exists()
    (folder / f"{POD}.stop").write_text("its guest hung\n")
    subprocess.run(stop, env=variables, check=True)
    subprocess.run(begin, env=variables, check=True)
    assert (folder / f"{POD}.stop").read_text() == "its guest hung\n"


def value_of(variable: Resource) -> str:
    """Return the value of a variable in the fourth pod."""
    path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    named = {"metadata.name": POD, "metadata.labels['apps.kubernetes.io/pod-index']": "3"}
    return named[path] if path else str(variable["value"])


def outlives_its_container(folder: Path, one: Resource) -> bool:
    """Whether files at this path survive a container restart."""
    mounts = [Path(each["mountPath"]) for each in one["volumeMounts"] if not each.get("readOnly")]
    return any(folder.is_relative_to(mount) for mount in mounts)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_pods_have_minimal_privileges(name: str) -> None:
    found = resources(rendered(values_of(name)))
    pods = [each["spec"]["template"]["spec"] for each in found if "template" in each.get("spec", {})]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] >= 10000
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] >= 30
    for one in containers(found):
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(one["resources"]) and "memory" in one["resources"]["limits"]
        secret = [each for each in one.get("env", []) if "PASSWORD" in each["name"] or "SECRET" in each["name"]]
        assert not secret, "secrets come as files, by reference"
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        chosen = [tuple(sorted(_selector(each).items())) for each in found if each["kind"] == kind and _selector(each)]
        assert len(set(chosen)) == len(chosen)
    roles = {each["metadata"]["name"] for each in found if each["kind"] in ("StatefulSet", "Deployment")}
    assert {each["metadata"]["name"] for each in found if each["kind"] == "NetworkPolicy"} == roles
    assert {each["metadata"]["name"] for each in found if each["kind"] == "PodDisruptionBudget"} == roles - {
        f"{RELEASE}-trainer",
        f"{RELEASE}-control",
        f"{RELEASE}-evaluator",
    }


def _selector(policy: Resource) -> dict[str, str]:
    selector = policy["spec"].get("podSelector") or policy["spec"].get("selector")
    return dict(selector["matchLabels"])


@pytest.mark.long
def test_strimzi_has_every_topic_of_the_catalog_under_its_name() -> None:
    values = values_of("strimzi") | {"config": {"topics": {"home_partitions": 12}}}
    values["kafka"]["namespace"] = "Team_A."
    found = [each for each in resources(rendered(values)) if each["kind"] == "KafkaTopic"]
    assert {each["spec"]["topicName"] for each in found} == {f"Team_A.{topic.name}" for topic in CATALOG}
    assert all(each["metadata"]["name"] == each["metadata"]["name"].lower() for each in found)
    partitions = {each["spec"]["topicName"]: each["spec"]["partitions"] for each in found}
    assert partitions["Team_A.rose.prompts.submitted.v1"] == 12
    assert partitions["Team_A.rose.turns.dispatched.v1"] == 32
    assert partitions["Team_A.rose.samples.outcomes.v1"] == 1


@pytest.mark.long
def test_strimzi_topics_have_the_retention_of_the_values() -> None:
    kept = Retention(outcomes=4_000_000.0, heartbeats=300.0)
    values = values_of("strimzi") | {
        "config": {"topics": {"outcomes_retention_seconds": 4_000_000, "heartbeats_retention_seconds": 300}}
    }
    found = {each["spec"]["topicName"]: each for each in resources(rendered(values)) if each["kind"] == "KafkaTopic"}
    for topic in CATALOG:
        name = f"{values['kafka'].get('namespace', '')}{topic.name}"
        assert found[name]["spec"]["config"] == expected_settings(topic, kept), topic.name


def merged(into: Any, patch: Any) -> Any:
    """Merge a patch as Kubernetes does: objects by field, null removes a field, lists by name."""
    if isinstance(into, dict) and isinstance(patch, dict):
        both = {name: merged(into.get(name), patch.get(name)) for name in {**into, **patch}}
        return {name: value for name, value in both.items() if not (name in patch and patch[name] is None)}
    if isinstance(into, list) and isinstance(patch, list):
        names = {each["name"]: each for each in patch}
        kept = [merged(each, names.pop(each["name"], None)) for each in into]
        return kept + list(names.values())
    return into if patch is None else patch


VLLM = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm}
spec:
  replicas: 8
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1}}
  selector: {matchLabels: {app: vllm}}
  template:
    metadata: {labels: {app: vllm}}
    spec:
      containers:
        - name: vllm
          image: vllm/vllm-openai:v0.32.0
          args: [--port, "8000", --max-num-seqs, "256"]
          env: [{name: HF_HUB_OFFLINE, value: "1"}]
          volumeMounts: [{name: models, mountPath: /models}]
      volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
"""


def test_patch_turns_a_vllm_deployment_into_a_lender_and_keeps_its_flags(tmp_path: Path) -> None:
    (server,) = resources(VLLM)
    (patch,) = resources((CHART.parent / "lender-patch.yaml").read_text())
    lender = merged(server, patch)
    for kubernetes in (OLDEST, NEWEST):
        kubernetes_validate.validate(lender, kubernetes, strict=True)
    pod = lender["spec"]["template"]["spec"]
    assert lender["spec"]["replicas"] == 8 and lender["spec"]["strategy"] == server["spec"]["strategy"]
    (one,) = pod["containers"]
    assert one["image"] == "vllm/vllm-openai:v0.32.0"
    assert {each["name"] for each in pod["volumes"]} >= {each["name"] for each in one["volumeMounts"]}
    line = one["command"][3:] + one["args"]
    command, given = parsed(line)
    assert command == "lend" and given["flags"] == ["--port", "8000", "--max-num-seqs", "256"]
    config = configured(line, {each["name"]: value_of(each) for each in one["env"]}, "", tmp_path)
    assert (config.settings.executor.name, config.settings.executor.slot) == (POD, None)
    stop_file = config.settings.lender.stop_file
    assert stop_file and outlives_its_container(stop_file.parent, one), "it is there, when a guest has hung"


def of_kind(kind: str, values: Values, role: str = "") -> Resource:
    """Return the resource of this kind, or that of the role."""
    found = [each for each in resources(rendered(values)) if each["kind"] == kind]
    (one,) = [each for each in found if not role or each["metadata"]["name"] == f"{RELEASE}-{role}"]
    return one


def test_added_executors_restart_no_lender_and_may_exceed_the_inboxes() -> None:
    fleets = [
        of_kind("StatefulSet", changed(values_of("lenders"), "executor.replicas", many), "lender") for many in (0, 99)
    ]
    assert fleets[0] == fleets[1]


def test_lending_servers_are_scraped_and_reachable(tmp_path: Path) -> None:
    monitoring = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    values = changed(values_of("lenders"), "metrics.podMonitor.enabled", True)
    values = changed(values, "networkPolicy.metricsFrom", monitoring)
    found = of_kind("PodMonitor", values)["spec"]["podMetricsEndpoints"]
    assert [each["port"] for each in found] == ["metrics", "http"]
    let_in = {
        rule["ports"][0]["port"]: rule["from"] for rule in of_kind("NetworkPolicy", values, "lender")["spec"]["ingress"]
    }
    assert monitoring == let_in["metrics"] and monitoring[0] in let_in["http"] and len(let_in["http"]) == 2


def test_one_control_app_runs_if_enabled_and_its_page_is_restricted() -> None:
    operators = [{"namespaceSelector": {"matchLabels": {"name": "operators"}}}]
    assert "-control" not in rendered(values_of("minimal"))
    values = changed(values_of("lenders"), "networkPolicy.pageFrom", operators)
    assert of_kind("Deployment", values, "control")["spec"]["replicas"] == 1
    let_in = {
        rule["ports"][0]["port"]: rule["from"]
        for rule in of_kind("NetworkPolicy", values, "control")["spec"]["ingress"]
    }
    assert let_in["page"] == operators != let_in["metrics"]


def test_trainer_of_several_ranks_is_started_by_torchrun() -> None:
    values = values_of("minimal")
    commands = {}
    for ranks in (1, 4):
        (trainer,) = (
            each["spec"]["template"]["spec"]["containers"][0]
            for each in resources(rendered(values | {"trainer": {"ranks": ranks}}))
            if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-trainer")
        )
        commands[ranks] = trainer.get("command"), trainer["args"]
    command = "torchrun --standalone --nproc-per-node 4 --shutdown-timeout 895 --no-python rose"
    assert commands == {1: (None, commands[1][1]), 4: (command.split(), commands[1][1])}


def test_every_role_can_be_traced(tmp_path: Path) -> None:
    values = changed(values_of("minimal"), "config.tracing", {"endpoint": "http://collector:4318", "ratio": 0.1})
    collector = [{"ports": [{"port": 4318, "protocol": "TCP"}]}]
    for role in ("router", "environment", "executor", "trainer"):
        values = changed(values, f"networkPolicy.egress.{role}", collector)
        assert of_kind("NetworkPolicy", values, role)["spec"]["egress"][-1] == collector[0]
    toml = of_kind("ConfigMap", values)["data"]["rose.toml"]
    assert configured(["router"], {}, toml, tmp_path)


def changed(values: Values, path: str, value: Any) -> Values:
    values = copy.deepcopy(values)
    *folders, last = path.split(".")
    into = values
    for folder in folders:
        into = into.setdefault(folder, {})
    into[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("kafka.bootstrapServers", "kafka:9092", "bootstrapServers"),
        ("kafka.bootstrapServer", "", "bootstrapServer"),
        ("executor.replica", 3, "replica"),
        ("executor.replicas", "three", "replicas"),
        ("config.trainer.lerning_rate", 1, "lerning_rate"),
        ("config.trainer.groups_per_step", "many", "groups_per_step"),
        ("config.metrics", {"port": 1}, "metrics"),
        ("config.executor.name", "executor-1", "name"),
        ("config.executor.slot", 1, "slot"),
        ("config.control.page_port", 1, "page_port"),
        ("control.replicas", 2, "replicas"),
        ("config.lender.promise", {"ttft": 1}, "ttft"),
        ("config.environment.model_folder", "/m", "model_folder"),
        ("router.resources.limit", {}, "limit"),
        ("topics.create", "always", "create"),
        ("topics.create", "strimzi", "topics.strimziCluster"),
        ("environment.replicas", 9, "config.topics.home_partitions: 8"),
        ("autoscaling.enabled", True, "autoscaling.prometheus"),
        ("lenders.replicas", 1, "lenders.image"),
        ("lenders.drainSeconds", 111, "lenders.gracePeriodSeconds"),
        ("networkPolicy.kafkaPorts", [], "kafkaPorts"),
        ("autoscaling.cooldownSeconds", 3601, "cooldownSeconds"),
        ("kafka.properties", {"sasl.password": "hidden"}, "sasl.password"),
        ("lenders.flags", ["--api-key", "hidden"], "lenders/flags"),
    ],
)
def test_misspelt_or_impossible_values_are_refused_by_name(path: str, value: object, words: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as refused:
        rendered(changed(values_of("minimal"), path, value))
    assert words in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_helm_lint_passes(name: str) -> None:
    import helm_python

    report = helm_python.lint(CHART, values_of(name), strict=True, kube_version=f"v{OLDEST}.0")
    worse = [each for each in report["messages"] or [] if each["severity"] > 1]
    assert not report["errors"] and not worse


def test_unknown_command_line_is_detected() -> None:
    assert app.registered_commands
    with pytest.raises(Exception, match="No such option"):
        parsed(["router", "--numbr", "3"])
