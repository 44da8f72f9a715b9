package charttest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// TestMain lets files have the modes that a kubelet gives them.
func TestMain(m *testing.M) {
	syscall.Umask(0o022)
	os.Exit(m.Run())
}

// binary returns the path of a program that `make build` made.
func binary(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs("../../bin/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	return path
}

// node is the part of a node's file system that pods mount, and the contents of their secrets.
type node struct {
	t       *testing.T
	root    string
	shm     string // on tmpfs: the node's /dev/shm, and its /dev/hugepages, of which few machines have pages
	secrets map[string]map[string]string
}

// newNode makes an empty node. Its names are short, for the paths of sockets.
func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, secrets: map[string]map[string]string{
		"redis": {"password": "secret"}, "peers": {"key": strings.Repeat("k", 32)},
	}}
	for into, parent := range map[*string]string{&n.root: "", &n.shm: "/dev/shm"} {
		dir, err := os.MkdirTemp(parent, "kv")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		*into = dir
	}
	return n
}

// sources returns the directory of each mount of a pod's container, which it makes as a kubelet
// does.
func (n *node) sources(pod corev1.PodSpec, settings *corev1.ConfigMap) map[string]string {
	n.t.Helper()
	out := map[string]string{}
	for _, m := range pod.Containers[0].VolumeMounts {
		at := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if at < 0 {
			n.t.Fatalf("%s is mounted from no volume", m.MountPath)
		}
		v := pod.Volumes[at]
		switch {
		case v.HostPath != nil:
			out[m.MountPath] = n.hostPath(v.HostPath)
		case v.ConfigMap != nil:
			out[m.MountPath] = n.files(v.Name, settings.Data, 0o644)
		case v.Secret != nil:
			out[m.MountPath] = n.files(v.Name, n.secrets[v.Secret.SecretName], os.FileMode(*v.Secret.DefaultMode))
		default: // another kind of volume is a directory here
			out[m.MountPath] = n.files(v.Name, nil, 0)
		}
	}
	return out
}

// shmBytes is room in /dev/shm for the pools of all tests that run at once.
const shmBytes = 512 << 20

// needShm skips the test where pools do not fit into /dev/shm: a container has 64 MiB by default.
func needShm(t *testing.T) {
	t.Helper()
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil {
		t.Fatal(err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < shmBytes {
		leaveOut(t, "/dev/shm has %d MiB, pools need %d (docker run --shm-size=1g)", free>>20, shmBytes>>20)
	}
}

func (n *node) hostPath(h *corev1.HostPathVolumeSource) string {
	dir := filepath.Join(n.root, h.Path)
	for _, memory := range []string{"/dev/shm/", "/dev/hugepages/"} {
		if rest, within := strings.CutPrefix(h.Path+"/", memory); within {
			dir = filepath.Join(n.shm, rest)
			if rest != "" {
				needShm(n.t)
			}
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	return dir
}

func (n *node) files(volume string, data map[string]string, mode os.FileMode) string {
	dir := filepath.Join(n.root, "volumes", volume)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Fatal(err)
	}
	for name, text := range data {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			n.t.Fatal(err)
		}
	}
	return dir
}

// environment returns a container's variables, with the fields of its pod and $(NAME) filled in.
func environment(c *corev1.Container) []string {
	out := []string{"PATH=" + os.Getenv("PATH")}
	known := map[string]string{}
	for _, e := range c.Env {
		value := e.Value
		if e.ValueFrom != nil {
			value = "192.0.2.7"
		}
		for name, other := range known {
			value = strings.ReplaceAll(value, "$("+name+")", other)
		}
		known[e.Name] = value
		out = append(out, e.Name+"="+value)
	}
	return out
}

// process is a program with its log, which ends with the test.
type process struct {
	cmd  *exec.Cmd
	logs chan string // lines of stderr; closed at their end
	all  bytes.Buffer
}

// start starts a command; its log is told line by line.
func start(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{cmd: cmd, logs: make(chan string, 1<<16)}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // also if the test is stopped
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.logs)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			p.logs <- lines.Text()
		}
		_, _ = io.Copy(io.Discard, stderr) // after a line that is too long
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	return p
}

// await reads the log until a line with all texts; the end of the log is an error.
func (p *process) await(t *testing.T, texts ...string) string {
	t.Helper()
	for line := range p.logs {
		p.all.WriteString(line + "\n")
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			return line
		}
	}
	t.Fatalf("the log ended without a line with %q: %v\n%s", texts, p.cmd.Wait(), &p.all)
	return ""
}

// end sends SIGTERM to a process of p and waits for p; the exit code must be 0.
func (p *process) end(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for line := range p.logs {
		p.all.WriteString(line + "\n")
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v\n%s", err, &p.all)
	}
}

// listens are addresses that a test cannot take: other tests may have them.
var listens = regexp.MustCompile(`0\.0\.0\.0:\d+`)

// The agent takes each rendered file of settings and variables, becomes ready, passes the rendered
// probes, and ends within the grace period's order: by SIGTERM, with exit code 0.
func TestAgentStartsWithEach(t *testing.T) {
	agent := binary(t, "kvagent")
	for _, c := range matrix {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			vals := values(t, c.values)
			memory, _ := vals["memory"].(map[string]any)
			if memory == nil {
				memory = map[string]any{}
			}
			memory["pool"], vals["memory"] = "64Mi", memory
			o, err := render(t, vals, c.apis...)
			if err != nil {
				t.Fatal(err)
			}
			n, pod := newNode(t), o.agent.Spec.Template.Spec
			inPlace := n.inPlace(pod, o)
			group, uid := pod.SecurityContext.SupplementalGroups, os.Getuid()
			if len(group) > 0 && uid != 0 {
				t.Skip("!!!! LEFT OUT: only root can give the directory to a group")
			}
			args := slices.Clone(pod.Containers[0].Args)
			for i := range args {
				args[i] = inPlace(args[i])
			}
			cmd := exec.Command(agent, args...)
			cmd.Env = environment(&pod.Containers[0])
			p := start(t, cmd)
			p.await(t, `"msg":"ready"`)
			for _, probe := range []*corev1.Probe{
				pod.Containers[0].StartupProbe, pod.Containers[0].ReadinessProbe, pod.Containers[0].LivenessProbe,
			} {
				command := probe.Exec.Command
				equal(t, "program", command[0], "kvagent")
				for i := range command {
					command[i] = inPlace(command[i])
				}
				if out, err := exec.Command(agent, command[1:]...).CombinedOutput(); err != nil {
					t.Errorf("%v: %v\n%s", command, err, out)
				}
			}
			p.end(t, cmd.Process.Pid)
		})
	}
}

// inPlace returns a function that replaces the paths of a pod's container in a text, and rewrites
// its files of settings so: a pod without a mount namespace of its own.
func (n *node) inPlace(pod corev1.PodSpec, o *objects) func(string) string {
	sources := n.sources(pod, o.settings)
	paths := make([]string, 0, len(sources))
	for path := range sources {
		paths = append(paths, path)
	}
	slices.SortFunc(paths, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, path := range paths {
		pairs = append(pairs, path, sources[path])
	}
	replace := strings.NewReplacer(pairs...).Replace
	for name, text := range o.settings.Data {
		text = listens.ReplaceAllString(replace(text), "127.0.0.1:0")
		file := filepath.Join(sources["/etc/kvagent/settings"], name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			n.t.Fatal(err)
		}
	}
	return replace
}

// chartOwned are the settings of the agent that the chart sets itself, or, as end-idle, leaves at
// their defaults: the kubelet starts an agent that ends again.
var chartOwned = []string{
	"config", "device", "drain-timeout", "dram-path", "end-idle", "http", "huge-pages", "log-json",
	"pool", "socket-dir", "socket-group", "tier", "tier-state",
}

// property is what the schema says of one setting.
type property struct {
	Type             string
	Enum             []string
	Minimum, Maximum *int64
}

// The schema of config has the agent's settings, no more and no fewer, with the ranges that the
// agent itself has.
func TestConfigIsTheAgents(t *testing.T) {
	agent := binary(t, "kvagent")
	text, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Properties struct {
			Config struct{ Properties map[string]property }
		}
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	help, err := exec.Command(agent, "serve", "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-h, )?--([a-z-]+)`).FindAllStringSubmatch(string(help), -1) {
		settings[m[1]] = true
	}
	for _, name := range chartOwned {
		if !settings[name] {
			t.Errorf("%s is no setting of the agent", name)
		}
		delete(settings, name)
	}
	for name := range settings {
		if _, there := schema.Properties.Config.Properties[name]; !there {
			t.Errorf("config.%s is not in the schema", name)
		}
	}
	for name, p := range schema.Properties.Config.Properties {
		if !settings[name] {
			t.Errorf("config.%s is no setting of the agent, or the chart's own", name)
		}
		if p.Type == "integer" {
			checkRange(t, agent, name, p)
		}
		for _, word := range p.Enum {
			if said := refusal(t, agent, name, word); strings.Contains(said, "--"+name) {
				t.Errorf("config.%s: %s: %s", name, word, said)
			}
		}
	}
}

func checkRange(t *testing.T, agent, name string, p property) {
	t.Helper()
	if p.Minimum == nil || p.Maximum == nil {
		t.Errorf("config.%s has no range", name)
		return
	}
	for _, beyond := range []int64{*p.Minimum - 1, *p.Maximum + 1} {
		want := fmt.Sprintf("allowed: %d to %d", *p.Minimum, *p.Maximum)
		if said := refusal(t, agent, name, fmt.Sprint(beyond)); !strings.Contains(said, want) {
			t.Errorf("config.%s: %d: the agent says %q, the schema %q", name, beyond, said, want)
		}
	}
}

// refusal returns what the agent says to a setting, besides to an address that it never takes.
func refusal(t *testing.T, agent, name, value string) string {
	t.Helper()
	out, err := exec.Command(agent, "serve", "--"+name+"="+value, "--http", "nowhere").CombinedOutput()
	if err == nil {
		t.Fatalf("--%s=%s and a bad address: the agent ran", name, value)
	}
	return string(out)
}

// The pod's memory holds what the schema lets the pool be: its ends are the agent's.
func TestPoolsEnds(t *testing.T) {
	agent := binary(t, "kvagent")
	for _, c := range []struct {
		pool string
		ok   bool
	}{{"64Mi", true}, {"2Ti", true}} {
		o := mustRender(t, "{memory: {pool: "+c.pool+"}}")
		var settings map[string]any
		if err := yaml.Unmarshal([]byte(o.settings.Data["kvagent.yaml"]), &settings); err != nil {
			t.Fatal(err)
		}
		if said := refusal(t, agent, "pool", settings["pool"].(string)); strings.Contains(said, "pool") == c.ok {
			t.Errorf("%s: %s", c.pool, said)
		}
	}
}
