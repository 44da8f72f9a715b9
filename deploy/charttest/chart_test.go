package charttest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const (
	serviceMonitors = "monitoring.coreos.com/v1/ServiceMonitor"
	podMonitors     = "monitoring.coreos.com/v1/PodMonitor"
)

// matrix are values that are allowed, each with what must be seen of it.
var matrix = []struct {
	name, values string
	apis         []string
	settings     []string // lines of the agent's file
	check        func(*testing.T, *objects)
}{
	{name: "defaults", values: "{}",
		settings: []string{"pool: 4096MiB", "huge-pages: \"off\"", "device: auto", "drain-timeout: 10s"},
		check: func(t *testing.T, o *objects) {
			pod := o.agent.Spec.Template.Spec
			equal(t, "runtime class", *pod.RuntimeClassName, "nvidia")
			equal(t, "memory", pod.Containers[0].Resources.Limits.Memory().String(), "6Gi")
			equal(t, "/dev/shm", hostPath(t, pod, "/dev/shm"), "/dev/shm")
			equal(t, "GPUs", envOf(pod, "NVIDIA_VISIBLE_DEVICES"), "all")
			if pod.HostIPC || pod.HostPID || pod.HostNetwork {
				t.Error("a namespace of the node is shared")
			}
			if o.service != nil || o.serviceMonitor != nil || o.podMonitor != nil {
				t.Error("a monitor without metrics")
			}
		}},
	{name: "host namespaces", values: "{hostIPC: true, hostPID: true, hostShm: false}",
		check: func(t *testing.T, o *objects) {
			pod := o.agent.Spec.Template.Spec
			if !pod.HostIPC || !pod.HostPID || hostPath(t, pod, "/dev/shm") != "" {
				t.Errorf("hostIPC %v, hostPID %v, /dev/shm %q", pod.HostIPC, pod.HostPID, hostPath(t, pod, "/dev/shm"))
			}
			contains(t, "notes", o.notes, "hostIPC true, hostPID true")
		}},
	{name: "CDI", values: "{gpu: {via: cdi, cdiDevice: nvidia.com/gpu=all}}",
		check: func(t *testing.T, o *objects) {
			if c := o.agent.Spec.Template.Spec.RuntimeClassName; c != nil {
				t.Errorf("runtime class %s", *c)
			}
			equal(t, "annotation",
				o.agent.Spec.Template.Annotations["nvidia.cdi.k8s.io/container.kvagent"], "nvidia.com/gpu=all")
			equal(t, "GPUs", envOf(o.agent.Spec.Template.Spec, "NVIDIA_VISIBLE_DEVICES"), "void")
		}},
	{name: "the default runtime", values: "{gpu: {via: default}}", settings: []string{"device: auto"}},
	{name: "no GPU", values: "{gpu: {via: none}}", settings: []string{"device: host"},
		check: func(t *testing.T, o *objects) {
			equal(t, "GPUs", envOf(o.agent.Spec.Template.Spec, "NVIDIA_VISIBLE_DEVICES"), "")
		}},
	{name: "huge pages", values: "{hugePages: {enabled: true}, memory: {pool: 65Mi, overhead: 512Mi}}",
		settings: []string{"huge-pages: auto", "pool: 65MiB"},
		check: func(t *testing.T, o *objects) {
			limits := o.agent.Spec.Template.Spec.Containers[0].Resources.Limits
			huge := limits["hugepages-2Mi"]
			equal(t, "huge pages", huge.String(), "66Mi")
			equal(t, "memory", limits.Memory().String(), "512Mi")
		}},
	{name: "warm pool", values: "{warmPool: {enabled: true}}",
		settings: []string{"dram-path: /mnt/kvagent-pool/pool"},
		check: func(t *testing.T, o *objects) {
			equal(t, "pool", hostPath(t, o.agent.Spec.Template.Spec, "/mnt/kvagent-pool"), "/dev/shm/kvagent")
		}},
	{name: "warm pool on huge pages",
		values: "{warmPool: {enabled: true, hostPath: /dev/hugepages/kvagent}, hugePages: {enabled: true}, " +
			"memory: {pool: 1000Mi}}",
		check: func(t *testing.T, o *objects) {
			huge := o.agent.Spec.Template.Spec.Containers[0].Resources.Limits["hugepages-2Mi"]
			equal(t, "huge pages", huge.String(), "1102Mi")
		}},
	{name: "disk", values: "{disk: {enabled: true, capacity: 1Gi, options: within=5s&write=save}}",
		settings: []string{"- disk:/mnt/kvagent-disk?capacity=1024MiB&within=5s&write=save",
			"tier-state: /var/lib/kvagent"}},
	{name: "disk on a volume",
		values: "{disk: {enabled: true, capacity: 1Gi, volume: {persistentVolumeClaim: {claimName: disk}}}}",
		check: func(t *testing.T, o *objects) {
			equal(t, "host path", hostPath(t, o.agent.Spec.Template.Spec, "/mnt/kvagent-disk"), "")
		}},
	{name: "shared tier", values: `{tiers: ["redis://127.0.0.1:1?password-file=/etc/kvagent/redis/password"],
			secrets: [{name: redis, mountPath: /etc/kvagent/redis}]}`,
		settings: []string{"- redis://127.0.0.1:1?password-file=/etc/kvagent/redis/password"}},
	{name: "peers", values: `{secrets: [{name: peers, mountPath: /etc/kvagent/peers}],
			config: {peer-listen: "0.0.0.0:9481", peer-key-file: /etc/kvagent/peers/key},
			env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}},
				{name: KVAGENT_PEER_ADVERTISE, value: "$(POD_IP):9481"}]}`,
		settings: []string{`peer-listen: 0.0.0.0:9481`}},
	{name: "another user", values: "{runAs: {user: 2147483647, group: 65532}, socketGroup: 2147483646}",
		settings: []string{`socket-group: "2147483646"`},
		check: func(t *testing.T, o *objects) {
			c := o.agent.Spec.Template.Spec.SecurityContext
			if *c.RunAsUser != 2147483647 || !*c.RunAsNonRoot ||
				!slices.Equal(c.SupplementalGroups, []int64{2147483646}) {
				t.Errorf("%+v", c)
			}
		}},
	{name: "drain", values: "{drainSeconds: 120, startSeconds: 33, update: {type: OnDelete}}",
		settings: []string{"drain-timeout: 120s"},
		check: func(t *testing.T, o *objects) {
			pod := o.agent.Spec.Template.Spec
			equal(t, "start probes", pod.Containers[0].StartupProbe.FailureThreshold, 7)
			if s := o.agent.Spec.UpdateStrategy; s.RollingUpdate != nil || s.Type != "OnDelete" {
				t.Errorf("%+v", s)
			}
		}},
	{name: "scheduling", values: `{priorityClassName: system-node-critical, nodeSelector: {gpu: "yes"},
			tolerations: [], podLabels: {team: a}, podAnnotations: {b: c}, update: {maxUnavailable: "10%"},
			affinity: {nodeAffinity: {}}, image: {repository: registry.invalid/kvagent, pullSecrets: [registry],
			digest: "sha256:` + strings.Repeat("0a", 32) + `"}}`,
		check: func(t *testing.T, o *objects) {
			equal(t, "at once", o.agent.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String(), "10%")
			contains(t, "image", o.agent.Spec.Template.Spec.Containers[0].Image, "kvagent@sha256:0a0a")
		}},
	{name: "metrics", values: "{metrics: {enabled: true, names: [node-7]}}",
		settings: []string{"http:", "- 0.0.0.0:9480", "- node-7"}},
	{name: "ServiceMonitor", values: "{metrics: {enabled: true, monitor: ServiceMonitor, labels: {release: p}}}",
		apis: []string{serviceMonitors},
		check: func(t *testing.T, o *objects) {
			if o.service == nil || o.serviceMonitor == nil {
				t.Fatalf("service %v, monitor %v", o.service, o.serviceMonitor)
			}
			equal(t, "port", o.serviceMonitor.Spec.Endpoints[0].Port, o.service.Spec.Ports[0].Name)
			equal(t, "label", o.serviceMonitor.Labels["release"], "p")
			selects(t, "service", o.service.Spec.Selector, o.agent.Spec.Template.Labels)
			selects(t, "monitor", o.serviceMonitor.Spec.Selector.MatchLabels, o.service.Labels)
		}},
	{name: "PodMonitor", values: "{metrics: {enabled: true, monitor: PodMonitor}}", apis: []string{podMonitors},
		check: func(t *testing.T, o *objects) {
			if o.service != nil || o.podMonitor == nil {
				t.Fatalf("service %v, monitor %v", o.service, o.podMonitor)
			}
			port := o.agent.Spec.Template.Spec.Containers[0].Ports[0].Name
			equal(t, "port", *o.podMonitor.Spec.PodMetricsEndpoints[0].Port, port)
			selects(t, "monitor", o.podMonitor.Spec.Selector.MatchLabels, o.agent.Spec.Template.Labels)
		}},
	{name: "a monitor without its API", values: "{metrics: {enabled: true, monitor: PodMonitor}}",
		apis: []string{serviceMonitors},
		check: func(t *testing.T, o *objects) {
			if o.podMonitor != nil {
				t.Error("a PodMonitor was made")
			}
			contains(t, "notes", o.notes, "No PodMonitor was made")
		}},
	{name: "settings", values: "{config: {eviction: lru, keep-percent: 20, pace: 2GiB/s, " +
		"allow-uid: [0, 4294967295], verify-sample: 1000000000}}",
		settings: []string{"eviction: lru", "keep-percent: 20", "verify-sample: 1000000000", "pace: 2GiB/s"}},
}

// Every set of values renders into objects that the API takes, and keeps what all of them promise.
func TestMatrix(t *testing.T) {
	for _, c := range matrix {
		t.Run(c.name, func(t *testing.T) {
			o := mustRender(t, c.values, c.apis...)
			if o.agent == nil || o.settings == nil {
				t.Fatal("no DaemonSet, or no ConfigMap")
			}
			checkPromises(t, o)
			for _, line := range c.settings {
				contains(t, "settings", "\n"+o.settings.Data["kvagent.yaml"]+"\n", "\n"+line+"\n")
			}
			if c.check != nil {
				c.check(t, o)
			}
		})
	}
}

// checkPromises checks what holds for all values: no rights, a file system that is only read, and
// time enough to end.
func checkPromises(t *testing.T, o *objects) {
	t.Helper()
	pod := o.agent.Spec.Template.Spec
	c := pod.Containers[0]
	s := c.SecurityContext
	if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.Privileged != nil ||
		s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) != 0 {
		t.Errorf("security context %+v", s)
	}
	if p := pod.SecurityContext.SeccompProfile; p == nil || p.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("seccomp profile %v", p)
	}
	if *pod.AutomountServiceAccountToken || *pod.EnableServiceLinks {
		t.Error("a token of the API, or variables of services")
	}
	var drain int64
	for _, line := range strings.Split(o.settings.Data["kvagent.yaml"], "\n") {
		if n, err := fmt.Sscanf(line, "drain-timeout: %ds", &drain); n == 1 && err == nil {
			break
		}
	}
	equal(t, "grace period", *pod.TerminationGracePeriodSeconds, drain+15+5)
	selects(t, "DaemonSet", o.agent.Spec.Selector.MatchLabels, o.agent.Spec.Template.Labels)
	equal(t, "settings", pod.Volumes[0].ConfigMap.Name, o.settings.Name)
	for _, m := range c.VolumeMounts {
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			t.Errorf("%s is mounted from no volume", m.MountPath)
		}
	}
	equal(t, "volumes", len(pod.Volumes), len(c.VolumeMounts))
}

// Without an image's name nothing but lint passes: a default would be pulled from a stranger.
func TestImageIsTheOperators(t *testing.T) {
	for text, want := range map[string]string{
		"{}": "image.repository",
		"{image: {repository: r.invalid/kvagent}}": "image.tag",
	} {
		vals := map[string]any{}
		if err := yaml.Unmarshal([]byte(text), &vals); err != nil {
			t.Fatal(err)
		}
		if _, err := render(t, vals); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestLint(t *testing.T) {
	for _, c := range matrix {
		for _, m := range lint.RunAll(chartDir, values(t, c.values), "inference").Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s", c.name, m)
			}
		}
	}
	for _, m := range lint.RunAll(chartDir, nil, "inference").Messages {
		if m.Severity > support.InfoSev {
			t.Errorf("the chart's own values: %s", m)
		}
	}
}

// What is not allowed is refused with the field and what is allowed.
func TestRefused(t *testing.T) {
	for text, want := range map[string][]string{
		"{memory: {pool: 64GB}}":                        {"/memory/pool", "Mi|Gi|Ti"},
		"{memory: {pool: 63Mi}}":                        {"memory.pool", `"63Mi"`, "64Mi to 2Ti"},
		"{memory: {pool: 2049Gi}}":                      {"memory.pool", "64Mi to 2Ti"},
		"{memory: {overhead: 255Mi}}":                   {"memory.overhead", "256Mi to 1Ti"},
		"{disk: {enabled: true, capacity: 9Mi}}":        {"disk.capacity", "64Mi to 64Ti"},
		"{disk: {capacity: 65Ti}}":                      {"disk.capacity", "64Mi to 64Ti"},
		"{disk: {options: admit}}":                      {"/disk/options"},
		"{drainSeconds: 3601}":                          {"/drainSeconds", "maximum", "3,600"},
		"{drainSeconds: -1}":                            {"/drainSeconds", "minimum", "0"},
		"{drainSeconds: 1.5}":                           {"/drainSeconds", "integer"},
		"{startSeconds: 29}":                            {"/startSeconds", "30"},
		"{gpu: {via: nvidia}}":                          {"/gpu/via", "runtimeClass", "cdi", "default", "none"},
		"{gpu: {cdiDevice: all}}":                       {"/gpu/cdiDevice"},
		"{runAs: {user: -1}}":                           {"/runAs/user", "minimum"},
		"{socketDir: run/kvagent}":                      {"/socketDir"},
		"{socketDir: /" + strings.Repeat("d", 80) + "}": {"/socketDir", "80"},
		"{metrics: {port: 80}}":                         {"/metrics/port", "1,024"},
		"{metrics: {monitor: Prometheus}}":              {"/metrics/monitor", "ServiceMonitor", "PodMonitor"},
		"{metrics: {monitor: PodMonitor}}":              {"metrics.monitor", "metrics.enabled"},
		"{config: {evict: lru}}":                        {"/config", "evict"},
		"{config: {pool: 1GiB}}":                        {"/config", "pool"},
		"{config: {keep-percent: 51}}":                  {"/config/keep-percent", "maximum", "50"},
		"{config: {peer-timeout: 2}}":                   {"/config/peer-timeout", "string"},
		"{config: {eviction: fifo}}":                    {"/config/eviction", "hazard", "lru"},
		"{env: [{name: KVAGENT_POOL, value: 1GiB}]}":    {"/env/0/name"},
		"{tiers: [\"tape:/dev/st0\"]}":                  {"/tiers/0", "redis"},
		"{update: {maxUnavailable: 0}}":                 {"/update/maxUnavailable"},
		"{update: {maxUnavailable: 0%}}":                {"/update/maxUnavailable"},
		"{secrets: [{name: s}]}":                        {"/secrets/0", "mountPath"},
		"{image: {digest: abc}}":                        {"/image/digest", "sha256"},
		"{hostIpc: true}":                               {"hostIpc"},
		"{metrics: {enabled: true}, config: {peer-listen: \"0.0.0.0:9480\"}}": {"config.peer-listen", "metrics.port"},
	} {
		_, err := render(t, values(t, text))
		if err == nil {
			t.Errorf("%s is taken", text)
			continue
		}
		for _, one := range want {
			if !strings.Contains(err.Error(), one) {
				t.Errorf("%s: %q is not in: %v", text, one, err)
			}
		}
	}
}

// The example's engine reaches the agent of the chart's own values: the same paths of the node
// under the same paths, and the same user.
func TestExampleFitsTheChart(t *testing.T) {
	agent, engine := mustRender(t, "{}").agent.Spec.Template.Spec, example(t, "vllm.yaml")
	if engine.deployment == nil || engine.disruptions == nil {
		t.Fatal("no Deployment, or no PodDisruptionBudget")
	}
	pod := engine.deployment.Spec.Template.Spec
	for _, path := range []string{"/run/kvagent", "/dev/shm"} {
		if host := hostPath(t, pod, path); host == "" || host != hostPath(t, agent, path) {
			t.Errorf("%s: %q of the node for the engine, %q for the agent", path, host, hostPath(t, agent, path))
		}
	}
	equal(t, "user", *pod.Containers[0].SecurityContext.RunAsUser, *agent.SecurityContext.RunAsUser)
	selects(t, "disruption budget", engine.disruptions.Spec.Selector.MatchLabels,
		engine.deployment.Spec.Template.Labels)
}

func hostPath(t *testing.T, pod corev1.PodSpec, mountPath string) string {
	t.Helper()
	for _, m := range pod.Containers[0].VolumeMounts {
		if m.MountPath != mountPath {
			continue
		}
		for _, v := range pod.Volumes {
			if v.Name == m.Name && v.HostPath != nil {
				return v.HostPath.Path
			}
		}
	}
	return ""
}

func envOf(pod corev1.PodSpec, name string) string {
	for _, e := range pod.Containers[0].Env {
		if e.Name == name {
			return e.Value
		}
	}
	return ""
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func contains(t *testing.T, what, text, want string) {
	t.Helper()
	if !strings.Contains(text, want) {
		t.Errorf("%s: %q is not in:\n%s", what, want, text)
	}
}

func selects(t *testing.T, what string, selector, labels map[string]string) {
	t.Helper()
	if len(selector) == 0 {
		t.Errorf("%s selects everything", what)
	}
	for key, value := range selector {
		equal(t, what+": label "+key, labels[key], value)
	}
}
