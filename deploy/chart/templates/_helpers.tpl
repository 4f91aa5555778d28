{{- define "rose.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "rose.selector" -}}
app.kubernetes.io/name: rose
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "rose.labels" -}}
app.kubernetes.io/name: rose
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rose
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "rose.image" -}}
{{ .root.Values.images.repository }}-{{ .family }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* JSON is TOML but for tables. */}}
{{- define "rose.toml-value" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ $key | toJson }} = {{ include "rose.toml-value" (index $ $key) }}{{ end }} }
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}

{{/* A run that nobody names has the release's name. */}}
{{- define "rose.toml" -}}
{{- range $section, $fields := mergeOverwrite (dict "run" (dict "name" .Release.Name)) (deepCopy .Values.config) }}
[{{ $section }}]
{{- range $field, $value := $fields }}
{{ $field }} = {{ include "rose.toml-value" $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* A setting as it is written: a number has all its digits, also where Go would write it with an exponent. */}}
{{- define "rose.setting" -}}
{{ if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{/* What tells any command where the broker is. */}}
{{- define "rose.broker-arguments" -}}
{{- range $name, $value := .root.Values.kafka.properties }}
- -X
- {{ printf "%s=%s" $name (include "rose.setting" $value) | quote }}
{{- end }}
{{- if .secret }}
- --command-config
- /etc/rose/kafka/client.properties
{{- end }}
{{- end }}

{{- define "rose.broker-environment" -}}
- {name: ROSE_BROKER__BOOTSTRAP_SERVER, value: {{ .Values.kafka.bootstrapServer | quote }}}
{{- with .Values.kafka.namespace }}
- {name: ROSE_BROKER__NAMESPACE, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "rose.pod-security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rose.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A role answers as soon as it begins, and then says itself when it hangs: to start it may take longer than this. */}}
{{- define "rose.probes" -}}
startupProbe:
  httpGet: {path: {{ .path | default "/healthz" }}, port: {{ .port | default "metrics" }}}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: {{ div (.startSeconds | default 300) 10 | max 1 }}
livenessProbe:
  httpGet: {path: {{ .path | default "/healthz" }}, port: {{ .port | default "metrics" }}}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet: {path: {{ .path | default "/readyz" }}, port: {{ .port | default "metrics" }}}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
{{- end }}

{{/* Where and how a pod runs: the same of every role. */}}
{{- define "rose.placement" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .values.gracePeriodSeconds }}
securityContext: {{- include "rose.pod-security" . | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "rose.selector" . | nindent 8 }}
{{- end }}

{{- define "rose.pod-metadata" -}}
labels: {{- include "rose.labels" . | nindent 2 }}
annotations:
  rose/config: {{ include "rose.toml" .root | sha256sum }}
{{- with .values.podAnnotations }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "rose.mounts" -}}
- {name: config, mountPath: /etc/rose/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .secret }}
- {name: kafka, mountPath: /etc/rose/kafka, readOnly: true}
{{- end }}
{{- if .key }}
- {name: key, mountPath: /etc/rose/keys, readOnly: true}
{{- end }}
{{- if .root.Values.model.volume }}
- {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "rose.volumes" -}}
- name: config
  configMap: {name: {{ include "rose.name" .root }}}
- name: tmp
  emptyDir: {}
{{- if .secret }}
- name: kafka
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
{{- if .key }}
- name: key
  secret: {secretName: {{ .key }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.model.volume }}
- name: model {{- toYaml .root.Values.model.volume | nindent 2 }}
{{- end }}
{{- end }}

{{/* What is particular to a role's container: `root`, `role`, `family`, `values`, `secret`, `key`, `command`, `arguments`. */}}
{{- define "rose.container" -}}
name: {{ .role }}
image: {{ .values.image | default (include "rose.image" .) | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- with .command }}
command: {{- toYaml . | nindent 2 }}
{{- end }}
args:
  - {{ .role }}
  - --config
  - /etc/rose/config/rose.toml
{{- range .arguments }}
  - {{ . | quote }}
{{- end }}
{{- include "rose.broker-arguments" . | trim | nindent 2 }}
env:
{{- if has .role (list "router" "environment") }}
  - name: ORDINAL
    valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end }}
{{- if eq .role "executor" }}
  - name: ROSE_EXECUTOR__NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .key }}
  - {name: ROSE_WEIGHTS__TRUSTED_KEY, value: /etc/rose/keys/trusted.pub}
{{- end }}
{{- end }}
{{- if and (eq .role "evaluator") .key }}
  - {name: ROSE_WEIGHTS__TRUSTED_KEY, value: /etc/rose/keys/trusted.pub}
{{- end }}
{{- if eq .role "control" }}
  - {name: ROSE_CONTROL__PAGE_HOST, value: 0.0.0.0}
  - {name: ROSE_CONTROL__PAGE_PORT, value: {{ .values.pagePort | quote }}}
{{- end }}
{{- if eq .role "trainer" }}
  - {name: ROSE_RUN__FOLDER, value: /var/lib/rose}
{{- if .key }}
  - {name: ROSE_WEIGHTS__SIGNING_KEY, value: /etc/rose/keys/signing.key}
{{- end }}
{{- end }}
{{- include "rose.broker-environment" .root | nindent 2 }}
  - {name: ROSE_METRICS__HOST, value: 0.0.0.0}
  - {name: ROSE_METRICS__PORT, value: {{ .root.Values.metrics.port | quote }}}
{{- with .values.extraEnv }}
{{- toYaml . | nindent 2 }}
{{- end }}
ports:
{{- if eq .role "control" }}
  - {name: page, containerPort: {{ .values.pagePort }}}
{{- end }}
  - {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
{{ include "rose.probes" dict }}
resources: {{- toYaml .values.resources | nindent 2 }}
securityContext: {{- include "rose.container-security" . | nindent 2 }}
volumeMounts: {{- include "rose.mounts" . | nindent 2 }}
{{- if has .role (list "executor" "trainer") }}
  - {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if eq .role "trainer" }}
  - {name: run, mountPath: /var/lib/rose}
{{- end }}
{{- if and (eq .role "evaluator") .values.promptsVolume }}
  - {name: prompts, mountPath: /etc/rose/prompts, readOnly: true}
{{- end }}
{{- end }}
