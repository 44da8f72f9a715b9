{{- define "kvagent.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvagent.selector" -}}
app.kubernetes.io/name: kvagent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvagent.labels" -}}
{{ include "kvagent.selector" . }}
app.kubernetes.io/component: agent
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* kvagent.mib returns a quantity of whole Mi, Gi or Ti in MiB. */}}
{{- define "kvagent.mib" -}}
{{- $n := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . }}{{ mul $n 1048576 }}{{ else if hasSuffix "Gi" . }}{{ mul $n 1024 }}{{ else }}{{ $n }}{{ end -}}
{{- end -}}

{{/* kvagent.ranges fails for values whose ranges the schema cannot express. */}}
{{- define "kvagent.ranges" -}}
{{- $pool := include "kvagent.mib" .Values.memory.pool | int64 -}}
{{- if or (lt $pool 64) (gt $pool 2097152) -}}
{{- fail (printf "memory.pool: %q, allowed: 64Mi to 2Ti" .Values.memory.pool) -}}
{{- end -}}
{{- $overhead := include "kvagent.mib" .Values.memory.overhead | int64 -}}
{{- if or (lt $overhead 256) (gt $overhead 1048576) -}}
{{- fail (printf "memory.overhead: %q, allowed: 256Mi to 1Ti" .Values.memory.overhead) -}}
{{- end -}}
{{- $disk := include "kvagent.mib" .Values.disk.capacity | int64 -}}
{{- if or (lt $disk 64) (gt $disk 67108864) -}}
{{- fail (printf "disk.capacity: %q, allowed: 64Mi to 64Ti" .Values.disk.capacity) -}}
{{- end -}}
{{- if and .Values.metrics.enabled (hasKey .Values.config "peer-listen") -}}
{{- if hasSuffix (printf ":%v" .Values.metrics.port) (get .Values.config "peer-listen") -}}
{{- fail (printf "config.peer-listen: %q, allowed: another port than metrics.port" (get .Values.config "peer-listen")) -}}
{{- end -}}
{{- end -}}
{{- if and (ne .Values.metrics.monitor "none") (not .Values.metrics.enabled) -}}
{{- fail (printf "metrics.monitor: %q without metrics.enabled, allowed: none, or metrics.enabled: true" .Values.metrics.monitor) -}}
{{- end -}}
{{- end -}}

{{- define "kvagent.image" -}}
{{- $i := .Values.image -}}
{{- if not $i.repository -}}
{{- fail "image.repository: \"\", allowed: the registry and name of the image that you built, such as registry.example.com/kvagent" -}}
{{- end -}}
{{- $tag := $i.tag | default .Chart.AppVersion -}}
{{- if $i.digest -}}
{{- printf "%s@%s" $i.repository $i.digest -}}
{{- else if $tag -}}
{{- printf "%s:%s" $i.repository $tag -}}
{{- else -}}
{{- fail "image.tag: \"\", allowed: the tag of your image, or image.digest" -}}
{{- end -}}
{{- end -}}

{{/* kvagent.settings returns the file of settings. */}}
{{- define "kvagent.settings" -}}
{{- $v := .Values -}}
{{- $s := dict "socket-dir" $v.socketDir "log-json" true -}}
{{- $s = set $s "pool" (printf "%sMiB" (include "kvagent.mib" $v.memory.pool)) -}}
{{- $s = set $s "drain-timeout" (printf "%ds" (int $v.drainSeconds)) -}}
{{- $s = set $s "device" (ternary "host" "auto" (eq $v.gpu.via "none")) -}}
{{- $s = set $s "huge-pages" (ternary "auto" "off" $v.hugePages.enabled) -}}
{{- if $v.warmPool.enabled }}{{ $s = set $s "dram-path" "/mnt/kvagent-pool/pool" }}{{ end -}}
{{- if $v.socketGroup }}{{ $s = set $s "socket-group" (toString (int64 $v.socketGroup)) }}{{ end -}}
{{- if $v.metrics.enabled }}{{ $s = set $s "http" (concat (list (printf "0.0.0.0:%d" (int $v.metrics.port))) $v.metrics.names) }}{{ end -}}
{{- $tiers := list -}}
{{- if $v.disk.enabled -}}
{{- $spec := printf "disk:/mnt/kvagent-disk?capacity=%sMiB" (include "kvagent.mib" $v.disk.capacity) -}}
{{- if $v.disk.options }}{{ $spec = printf "%s&%s" $spec $v.disk.options }}{{ end -}}
{{- $tiers = append $tiers $spec -}}
{{- end -}}
{{- $tiers = concat $tiers $v.tiers -}}
{{- if $tiers }}{{ $s = set $s "tier" $tiers }}{{ $s = set $s "tier-state" "/var/lib/kvagent" }}{{ end -}}
{{- toYaml (merge $s $v.config) -}}
{{- end -}}

{{/* kvagent.huge returns the huge pages of a pod, in MiB: a pool's file has its headers on them too. */}}
{{- define "kvagent.huge" -}}
{{- $pool := include "kvagent.mib" .Values.memory.pool | int64 -}}
{{- if .Values.warmPool.enabled }}{{ $pool = add $pool (div $pool 10) 2 }}{{ end -}}
{{- mul 2 (div (add $pool 1) 2) -}}
{{- end -}}
