package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/lab"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// asCommand makes the test binary the command itself, or kvbench where it is asked for one of that
// program's commands.
const asCommand = "KVAGENT_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asNeighbour); dir != "" {
		neighbour(dir)
	}
	if os.Getenv(asCommand) != "" {
		if os.Getenv(noKill) != "" {
			endWithin = 3 * time.Second
			moverKill = func(*os.Process) error { return nil }
		}
		replaceLimits(os.Getenv(testLimits))
		if len(os.Args) > 1 && slices.Contains([]string{"mock", "replay", "bench"}, os.Args[1]) {
			os.Exit(lab.Main(os.Args[1:], os.Stderr))
		}
		os.Args = append([]string{"kvagent"}, os.Args[1:]...)
		main()
		return
	}
	os.Exit(m.Run())
}

// testLimits replaces limits of serve that have no flag, such as takeover=1h,sessions=64.
const testLimits = "KVAGENT_TEST_LIMITS"

func replaceLimits(text string) {
	var err error
	for pair := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(pair, "=")
		switch name {
		case "takeover":
			takeoverWait, err = time.ParseDuration(value)
		case "gpu-start":
			gpuLimits.Start, err = time.ParseDuration(value)
		case "gpu-import":
			gpuLimits.Import, err = time.ParseDuration(value)
		case "sessions":
			agentLimits.Sessions, err = strconv.Atoi(value)
		}
		if err != nil {
			panic(err)
		}
	}
}

// kvagentCommand runs a command of kvagent, or of kvbench, in a process of its own.
func kvagentCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if args[0] == "replay" {
		args = append([]string{"replay", "--kvagent", self}, args[1:]...)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), asCommand+"=1")
	return cmd
}

func kvagentOutput(t *testing.T, args ...string) (string, int) {
	t.Helper()
	out, err := kvagentCommand(t, args...).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out), 0
}

// processLog is what a process has said so far; it may be read while the process writes.
type processLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *processLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *processLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// startServe starts serve and waits until it is ready.
func startServe(t *testing.T, args ...string) (cmd *exec.Cmd, dir string, log *processLog) {
	t.Helper()
	root, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) }) // a leftover of a failed test does no harm
	dir, log = filepath.Join(root, "s"), &processLog{}
	cmd = kvagentCommand(t, append([]string{"serve", "--socket-dir", dir, "--pool", "16MiB"}, args...)...)
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	defer func() {
		if t.Failed() {
			t.Logf("the agent's log: %s", log)
		}
	}()
	pooltest.Until(t, "the agent is ready", func() bool {
		body, err := adminclient.New(dir).Get(t.Context(), "/readyz")
		return err == nil && strings.TrimSpace(string(body)) == "ok"
	})
	return cmd, dir, log
}

// The commands against a running agent: status, set, a second serve, and the end by a signal.
func TestServeAndCommands(t *testing.T) {
	cmd, dir, log := startServe(t, "--log-json")
	out, code := kvagentOutput(t, "status", "--socket-dir", dir)
	if code != 0 || !strings.Contains(out, "ready, process") || !strings.Contains(out, "16.0 MiB") {
		t.Errorf("status: %d %s", code, out)
	}
	out, code = kvagentOutput(t, "status", "--json", "--socket-dir", dir)
	var st map[string]any
	if err := json.Unmarshal([]byte(out), &st); code != 0 || err != nil {
		t.Fatalf("status --json: %d %v %s", code, err, out)
	}
	for _, key := range []string{"engines", "regions", "leases", "blocks_stored", "blocks_saved", "blocks_loaded",
		"lookups", "lookup_hits"} {
		if _, ok := st[key].(float64); !ok {
			t.Errorf("status --json: %s is %v, want a number", key, st[key])
		}
	}
	if out, code = kvagentOutput(t, "set", "loads=off", "--socket-dir", dir); code != 0 ||
		out != "loads=off saves=on\n" {
		t.Errorf("set: %d %q", code, out)
	}
	if out, code = kvagentOutput(t, "set", "loads=sometimes", "--socket-dir", dir); code != exitConfig ||
		!strings.Contains(out, "allowed: loads=on, loads=off") {
		t.Errorf("set: %d %q", code, out)
	}
	t.Setenv(testLimits, "takeover=100ms")
	if out, code = kvagentOutput(t, "serve", "--socket-dir", dir, "--pool", "16MiB"); code != exitHeld ||
		!strings.Contains(out, "in use by process") {
		t.Errorf("a second agent: %d %s", code, out)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("serve ended with %v: %s", err, log)
	}
	for line := range strings.Lines(log.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("no JSON: %s", line)
		}
	}
	if out, code = kvagentOutput(t, "status", "--socket-dir", dir); code != exitFailed ||
		!strings.Contains(out, "no agent answers") {
		t.Errorf("status of none: %d %s", code, out)
	}
}

// A pool that the machine can never give is a setting that is not allowed.
func TestPoolLargerThanTheMachine(t *testing.T) {
	out, code := kvagentOutput(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "2TiB")
	if code != exitConfig || !strings.Contains(out, "pool: 2TiB: ") || !strings.Contains(out, "the machine has ") {
		t.Errorf("a pool of 2 TiB on this machine: %d %s", code, out)
	}
}

// An agent outlives the reader of its log.
func TestLogReaderGoes(t *testing.T) {
	cmd := kvagentCommand(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "1MiB")
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := log.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	_ = log.Close() // its further output breaks the pipe
	pooltest.Until(t, "the agent answers", func() bool {
		_, err := adminclient.New(cmd.Args[3]).Get(t.Context(), "/readyz")
		return err == nil
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("serve ended with %v", err)
	}
}

// An agent that was given a relative directory tells the engines, which run elsewhere, where that
// is.
func TestRelativeSocketDir(t *testing.T) {
	t.Chdir(t.TempDir())
	s := defaultServeSettings()
	s.socketDir = "kv"
	c, _, err := s.agentConfig()
	if here, _ := os.Getwd(); err != nil || c.Dir != filepath.Join(here, "kv") {
		t.Errorf("the agent's directory is %q (%v), want that of %s", c.Dir, err, here)
	}
}

// A mock that is interrupted leaves in order, and does not run its requests to the end.
func TestMockInterrupted(t *testing.T) {
	_, dir, _ := startServe(t)
	cmd := kvagentCommand(t, "mock", "--socket-dir", dir, "--requests", "50000", "--block-bytes", "4096")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	waitStatus(t, dir, "blocks_saved", func(n float64) bool { return n > 0 })
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(pooltest.WaitLimit, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != exitFailed ||
		!strings.Contains(out.String(), "requests left") {
		text := out.String()
		t.Errorf("mock ended with %v: ...%s", err, text[max(0, len(text)-300):])
	}
	waitStatus(t, dir, "engines", func(n float64) bool { return n == 0 })
}

// waitStatus waits until a number of the agent's status is as wanted.
func waitStatus(t *testing.T, dir, key string, want func(float64) bool) {
	t.Helper()
	var last any
	defer func() {
		if t.Failed() {
			t.Logf("status: %s is %v", key, last)
		}
	}()
	pooltest.Until(t, key+" of the status is as wanted", func() bool {
		var st map[string]any
		body, err := adminclient.New(dir).Get(t.Context(), "/status")
		if err != nil || json.Unmarshal(body, &st) != nil {
			return false
		}
		last = st[key]
		n, ok := last.(float64)
		return ok && want(n)
	})
}

func TestCommandsOfAStranger(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--help"}, 0, "kvagent serve --socket-dir DIR"},
		{[]string{"serve", "--help"}, 0, "Exit codes"},
		{[]string{"serve", "--nonsense"}, exitConfig, "unknown flag: --nonsense"},
		{[]string{"serve", "--pool", "2"}, exitConfig, "allowed: 64KiB to 2TiB"},
		{[]string{"serve", "--socket-dir", "/" + strings.Repeat("d", 94)}, exitConfig, "allowed: 1 to 94"},
		{[]string{"version"}, 0, "session protocol 3\n"},
		{[]string{"completion", "bash"}, 0, "kvagent"},
		{[]string{"set"}, exitConfig, "requires at least 1 arg"},
	} {
		out, code := kvagentOutput(t, c.args...)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%v: exit %d, want %d; %s", c.args, code, c.code, out)
		}
	}
}
