package main

import (
	"net"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func (o *replayed) from(name string) uint64 {
	for _, s := range o.Sources {
		if s.Name == name {
			return s.Blocks
		}
	}
	return 0
}

// A pool much smaller than the trace serves most of it from disk, every byte checked, also when
// agent and engines are killed.
func TestReplayOverDisk(t *testing.T) {
	t.Parallel()
	disk := "disk:" + filepath.Join(t.TempDir(), "disk") + "?capacity=1GiB&write=save"
	o := replayJSON(t, "--requests", "400", "--pool", "24MiB", "--engine-blocks", "600", "--tier", disk)
	o.clean(t)
	if got := o.from("disk"); got < 500 {
		t.Errorf("%d blocks came from disk, want 500 and more: %+v", got, o.Sources)
	}
	if o.HitRate < o.SimHitRate+0.05 {
		t.Errorf("hit rate %.3f, without the tier it would be %.3f", o.HitRate, o.SimHitRate)
	}
	o = replayJSON(t, "--requests", "300", "--pool", "24MiB", "--engine-blocks", "600", "--tier", disk,
		"--kill-agent-every", "100", "--kill-engine-every", "100")
	o.clean(t)
	if o.AgentKills == 0 {
		t.Error("the agent was not killed")
	}
}

// startRedis starts a real server on a free port of loopback.
func startRedis(t *testing.T) (addr string, server *exec.Cmd) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Skip("SKIPPED: no redis-server in the path; install the package redis-server")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	addr = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	server = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--dir", t.TempDir())
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGCONT)
		_ = server.Process.Kill()
		_ = server.Wait()
	})
	for end := time.Now().Add(10 * time.Second); ; {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			return addr, server
		}
		if time.Now().After(end) {
			t.Fatal("redis-server does not listen")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Options of a tier, and of a replay, that wait for what comes late because the machine is busy. A
// question that its store answers too late for the tier, or a look-up that is answered too late for
// the engine, costs the rest of a prompt: then hits tell how fast the machine is, and not whether
// they are found.
const patientTier = "ask-within=10s&fetch-within=10s&put-within=10s"

var patientEngines = []string{"--lookup-timeout", "10s"}

// Two agents over one store: the blocks of one are hits on the other.
func TestReplayTwoNodes(t *testing.T) {
	addr, _ := startRedis(t)
	o := replayJSON(t, append(patientEngines, "--requests", "300", "--pace", "6s", "--nodes", "2", "--shared",
		"redis://"+addr+"?"+patientTier)...)
	o.clean(t)
	if got := o.from("redis"); got < 365 { // of 374 that the other node saved
		t.Errorf("%d blocks came from the shared store, want 365 and more: %+v", got, o.Sources)
	}
	if o.BlocksHitOther == 0 {
		t.Error("no node hit what another saved")
	}
}

// A server that stops for a while, and one that dies, cost hits and nothing else.
func TestReplayServerStops(t *testing.T) {
	addr, server := startRedis(t)
	var stopped bool
	for _, at := range []time.Duration{300 * time.Millisecond, 900 * time.Millisecond} {
		signal := syscall.SIGCONT
		if !stopped {
			signal, stopped = syscall.SIGSTOP, true
		}
		timer := time.AfterFunc(at, func() { _ = server.Process.Signal(signal) })
		defer timer.Stop()
	}
	dead := time.AfterFunc(2*time.Second, func() { _ = server.Process.Kill() })
	defer dead.Stop()
	o := replayJSON(t, "--requests", "400", "--pace", "3s", "--pool", "24MiB", "--engine-blocks", "600", "--shared",
		"redis://"+addr+"?fetch-within=300ms&put-within=300ms")
	o.clean(t)
	if o.Requests != 400 {
		t.Errorf("%d requests of 400", o.Requests)
	}
}
