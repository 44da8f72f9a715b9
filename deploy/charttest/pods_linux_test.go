package charttest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// sandbox is the script of a pod without a container runtime: a root of its own with the system's
// programs, a /proc of its own, and the pod's mounts; then the root is only read, and the command
// runs without capabilities. Arguments: the root, the program's folder, the user, the group, the
// further groups, "SOURCE PATH" for each mount, --, the command. Its first line of stderr names
// its namespaces.
const sandbox = `
set -eu
PATH=$PATH:/usr/sbin:/sbin
root=$1 programs=$2 user=$3 group=$4 groups=$5
shift 5
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
for d in bin sbin lib lib32 lib64 libx32; do
	if [ -L /$d ]; then cp -d /$d "$root/$d"
	elif [ -d /$d ]; then mkdir "$root/$d"; mount --bind /$d "$root/$d"; fi
done
mkdir -p "$root/usr" "$root/proc" "$root/dev/shm" "$root/etc" "$root/opt/bin" "$root/sys"
mount --bind /usr "$root/usr"
mount --bind "$programs" "$root/opt/bin"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
for f in null zero urandom; do : >"$root/dev/$f"; mount --bind /dev/$f "$root/dev/$f"; done
mount -t tmpfs tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
	mkdir -p "$root$2"
	mount --bind "$1" "$root$2"
	shift 2
done
shift
mount -o remount,ro "$root"
cd "$root/proc/self/ns"
echo "namespaces $(readlink mnt ipc pid | tr '\n' ' ')" >&2
cd /
exec chroot "$root" /usr/bin/setpriv --pdeathsig KILL --no-new-privs --bounding-set=-all --inh-caps=-all \
	--reuid "$user" --regid "$group" --groups "$groups" "$@"
`

// unshare are the namespaces of a pod.
var unshare = []string{"--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"}

// requirePods is the variable that makes what pods and their pools lack here an error.
const requirePods = "KVAGENT_REQUIRE_PODS"

// leaveOut skips the test, loudly, unless it may not be left out.
func leaveOut(t *testing.T, format string, args ...any) {
	t.Helper()
	why := fmt.Sprintf(format, args...)
	if os.Getenv(requirePods) != "" {
		t.Fatalf("%s=%s: %s", requirePods, os.Getenv(requirePods), why)
	}
	t.Skip("!!!! LEFT OUT: " + why)
}

// mounts is a script of what else of sandbox may be refused: by capabilities, by a filter of system
// calls, or by the kernel's other rules.
const mounts = `
set -eu
PATH=$PATH:/usr/sbin:/sbin
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/usr" "$1/sys" "$1/proc"
mount --bind /usr "$1/usr"
mount --rbind /sys "$1/sys"
mount -t proc proc "$1/proc"
mount -o remount,ro "$1"
setpriv --no-new-privs --bounding-set=-all --inh-caps=-all grep -q '^CapEff:[[:space:]]*0*$' /proc/self/status ||
	{ echo "capabilities cannot be given up"; exit 1; }
`

// needPods skips the test where the pods' namespaces and mounts cannot be made, or their processes
// cannot be looked into.
func needPods(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		leaveOut(t, "two pods in namespaces of their own need root")
	}
	if _, err := os.Stat("/proc/thread-self/children"); err != nil {
		leaveOut(t, "this kernel does not tell of a process's children: %v", err)
	}
	command := append(slices.Clone(unshare), "sh", "-c", mounts, "mounts", t.TempDir())
	if out, err := exec.Command("unshare", command...).CombinedOutput(); err != nil {
		leaveOut(t, "namespaces and mounts cannot be made here: %v: %s", err, out)
	}
	needPidFDs(t)
	needPeerPidFD(t)
}

// needPidFDs skips the test where a socket of a process without rights, of another user, cannot be
// opened here too.
func needPidFDs(t *testing.T) {
	t.Helper()
	other := exec.Command("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all",
		"--reuid", "65532", "--regid", "65532", "--clear-groups", "sh", "-c", "echo up; exec cat")
	stdin, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		leaveOut(t, "rights cannot be given up here: %v", err)
	}
	defer func() {
		stdin.Close()
		_ = other.Wait() // it may have failed
	}()
	if !bufio.NewScanner(stdout).Scan() {
		leaveOut(t, "rights cannot be given up here")
	}
	pidfd, err := unix.PidfdOpen(other.Process.Pid, 0)
	if err != nil {
		leaveOut(t, "pidfd_open: %v", err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 0, 0)
	if err != nil {
		leaveOut(t, "pidfd_getfd: %v", err)
	}
	unix.Close(fd)
	if _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", other.Process.Pid)); err != nil {
		leaveOut(t, "the files of another user's process: %v", err)
	}
}

// needPeerPidFD skips the test where the kernel does not give a descriptor of a socket's peer
// (before Linux 6.5).
func needPeerPidFD(t *testing.T) {
	t.Helper()
	const soPeerPidFD = 77
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.GetsockoptInt(pair[0], unix.SOL_SOCKET, soPeerPidFD)
	if err == nil {
		unix.Close(fd)
	}
	unix.Close(pair[0])
	unix.Close(pair[1])
	if err != nil {
		leaveOut(t, "this kernel has no SO_PEERPIDFD (Linux 6.5): %v", err)
	}
}

// inPod returns a command that runs in a pod of its own: with a container's mounts and user, in
// namespaces that it shares with nothing.
func (n *node) inPod(pod corev1.PodSpec, settings *corev1.ConfigMap, command ...string) *exec.Cmd {
	n.t.Helper()
	user, group, groups := int64(0), int64(0), []string{"0"}
	if s := pod.SecurityContext; s != nil && s.RunAsUser != nil {
		user, group = *s.RunAsUser, *s.RunAsGroup
		groups = []string{strconv.FormatInt(group, 10)}
		for _, g := range s.SupplementalGroups {
			groups = append(groups, strconv.FormatInt(g, 10))
		}
	}
	programs := filepath.Dir(binary(n.t, "kvagent"))
	args := append(slices.Clone(unshare), "sh", "-c", sandbox, "pod", n.t.TempDir(), programs,
		strconv.FormatInt(user, 10), strconv.FormatInt(group, 10), strings.Join(groups, ","))
	for path, source := range n.sources(pod, settings) {
		args = append(args, source, path)
	}
	cmd := exec.Command("unshare", append(append(args, "--"), command...)...)
	cmd.Env = append(environment(&pod.Containers[0]), "PATH=/opt/bin:/usr/bin:/bin")
	return cmd
}

// run runs a command in a pod to its end.
func (n *node) run(pod corev1.PodSpec, settings *corev1.ConfigMap, command ...string) string {
	n.t.Helper()
	cmd := n.inPod(pod, settings, command...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		n.t.Errorf("%v: %v\n%s%s", command, err, out, &errs)
	}
	return string(out)
}

// first returns the process that unshare started, the first of its PID namespace.
func first(t *testing.T, p *process) int {
	t.Helper()
	pid := p.cmd.Process.Pid
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return child
}

// apart checks that the pods share no namespace with each other, nor with the test.
func apart(t *testing.T, pods ...string) {
	t.Helper()
	seen := map[string]bool{}
	for _, kind := range []string{"mnt", "ipc", "pid"} {
		own, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		seen[own] = true
	}
	for _, line := range pods {
		names := strings.Fields(line)[1:]
		equal(t, "namespaces of a pod", len(names), 3)
		for _, name := range names {
			if seen[name] {
				t.Errorf("%s is shared", name)
			}
			seen[name] = true
		}
	}
}

// left are a mock engine's figures at its end.
type left struct {
	Op    string
	Stats struct {
		Saved  int `json:"blocks_saved"`
		Loaded int `json:"blocks_loaded"`
		Wrong  int `json:"wrong_bytes"`
		Failed int `json:"loads_failed"`
	}
}

// An agent and engines in pods of the chart and of the example: without a capability, on a root
// that is only read, and without a common mount, IPC or PID namespace. The engines find the agent
// by its path; what one saves the next one loads; the death of one is noticed; probes pass, and
// SIGTERM ends the agent.
func TestTwoPods(t *testing.T) {
	needPods(t)
	for name, text := range map[string]string{
		"defaults":     "{memory: {pool: 64Mi}}",
		"another user": "{memory: {pool: 64Mi}, runAs: {user: 65532, group: 65532}, socketGroup: 3000}",
		"warm pool":    "{memory: {pool: 64Mi}, warmPool: {enabled: true}}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := mustRender(t, text)
			n, pod := newNode(t), o.agent.Spec.Template.Spec
			c := pod.Containers[0]
			n.give(*pod.SecurityContext.RunAsUser, *pod.SecurityContext.RunAsGroup, n.sources(pod, o.settings))
			engine := example(t, "vllm.yaml").deployment.Spec.Template.Spec
			if user := *pod.SecurityContext.RunAsUser; user != 0 {
				engine.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &user, RunAsGroup: &user,
					SupplementalGroups: pod.SecurityContext.SupplementalGroups}
			}
			status := n.run(pod, o.settings, "cat", "/proc/self/status")
			contains(t, "a process of the pod", status, "CapEff:\t0000000000000000")
			contains(t, "a process of the pod", status, "NoNewPrivs:\t1")

			agent := start(t, n.inPod(pod, o.settings, append([]string{"kvagent"}, c.Args...)...))
			agentIn := agent.await(t, "namespaces ")
			agent.await(t, `"msg":"ready"`)
			for _, probe := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
				n.run(pod, o.settings, probe.Exec.Command...)
			}
			mock := strings.Fields("kvbench mock --model m --seed 7 --requests 40 --engine-blocks 400")
			saved, loaded := n.mock(engine, mock), n.mock(engine, mock)
			if saved.Stats.Saved == 0 || loaded.Stats.Loaded == 0 || loaded.Stats.Wrong+loaded.Stats.Failed != 0 {
				t.Errorf("the first engine %+v, the second %+v", saved.Stats, loaded.Stats)
			}
			n.killed(engine, agent, agentIn)
			agent.end(t, first(t, agent))
		})
	}
}

// give gives a pod's directories of the node to its user, as the administrator does.
func (n *node) give(user, group int64, sources map[string]string) {
	for path, source := range sources {
		if path == "/dev/shm" {
			if err := os.Chmod(source, 0o777|os.ModeSticky); err != nil {
				n.t.Fatal(err)
			}
			continue
		}
		if err := os.Chown(source, int(user), int(group)); err != nil {
			n.t.Fatal(err)
		}
	}
	for _, dir := range []string{n.root, n.shm} {
		if err := os.Chmod(dir, 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
}

// mock runs a mock engine and returns its figures.
func (n *node) mock(pod corev1.PodSpec, command []string) (last left) {
	n.t.Helper()
	out := strings.TrimSpace(n.run(pod, nil, command...))
	line := out[strings.LastIndex(out, "\n")+1:]
	if err := json.Unmarshal([]byte(line), &last); err != nil || last.Op != "left" {
		n.t.Errorf("the engine's last line: %v: %s", err, line)
	}
	return last
}

// killed kills an engine whose sockets somebody else holds open: the agent has no number for the
// process, and sees no end of its sockets, but the kernel's descriptor of it tells.
func (n *node) killed(pod corev1.PodSpec, agent *process, agentIn string) {
	n.t.Helper()
	list := corev1.ConfigMap{Data: map[string]string{"list": strings.Repeat("00", 31) + "01\n"}}
	pod.Volumes = append(slices.Clone(pod.Volumes), corev1.Volume{Name: "hashes", VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{}}})
	pod.Containers = slices.Clone(pod.Containers)
	pod.Containers[0].VolumeMounts = append(slices.Clone(pod.Containers[0].VolumeMounts),
		corev1.VolumeMount{Name: "hashes", MountPath: "/hashes"})
	cmd := n.inPod(pod, &list, "kvbench", "mock", "--fill", "/hashes/list", "--hold", "--model", "held")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	engine := start(n.t, cmd)
	apart(n.t, agentIn, engine.await(n.t, "namespaces "))
	for lines := bufio.NewScanner(stdout); ; {
		if !lines.Scan() {
			n.t.Fatalf("the engine did not fill the pool: %v\n%s", cmd.Wait(), &engine.all)
		}
		if lines.Text() == "filled 1" {
			break
		}
	}
	victim, err := unix.PidfdOpen(first(n.t, engine), 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer unix.Close(victim)
	defer holdSockets(n.t, victim, first(n.t, engine))()
	if err := unix.PidfdSendSignal(victim, unix.SIGKILL, nil, 0); err != nil {
		n.t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for range 2 {  // its scheduler's session, and its worker's
		agent.await(n.t, `"session ended"`, `"pid":0`, "process died", `"registered":true`)
	}
}

// holdSockets opens a process's sockets here too, until the returned function is called.
func holdSockets(t *testing.T, pidfd, pid int) (release func()) {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	var held []int
	for _, f := range files {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name())); err != nil ||
			!strings.HasPrefix(to, "socket:") {
			continue
		}
		number, err := strconv.Atoi(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdGetfd(pidfd, number, 0)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, fd)
	}
	if len(held) < 2 {
		t.Errorf("the engine has %d sockets", len(held))
	}
	return func() {
		for _, fd := range held {
			unix.Close(fd)
		}
	}
}
