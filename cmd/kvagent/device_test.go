package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/settings"
)

// A start that is to need a GPU ends where there is none, and says so; any other goes on.
func TestServeWithoutCUDA(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this machine has a GPU")
	}
	out, code := kvagentOutput(t, "serve", "--device", "cuda", "--pool", "16MiB", "--socket-dir", t.TempDir())
	if code != exitFailed || !strings.Contains(out, "no CUDA") || !strings.Contains(out, "device") {
		t.Errorf("exit %d, want %d and why:\n%s", code, exitFailed, out)
	}
	for _, device := range []string{settings.DeviceAuto, settings.DeviceHost, settings.DeviceHostMover} {
		serve, dir, log := startServe(t, "--device", device)
		out, code := kvagentOutput(t, "status", "--json", "--socket-dir", dir)
		if code != 0 || strings.Contains(out, `"device": "host"`) != (device == settings.DeviceHostMover) {
			t.Errorf("%s: exit %d, movers are not as asked for:\n%s", device, code, out)
		}
		endServe(t, serve)
		said := strings.Count(log.String(), "no GPU here") + strings.Count(log.String(), "no CUDA")
		if want := 2; device != settings.DeviceHost && said != want || device == settings.DeviceHost && said != 0 {
			t.Errorf("%s: the log says %d times that there is no GPU, want one line with the reason:\n%s", device, said,
				log)
		}
	}
}

// endServe ends an agent in order, after which its log is complete and no longer written.
func endServe(t *testing.T, serve *exec.Cmd) {
	t.Helper()
	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := serve.Wait(); err != nil {
		t.Errorf("serve ended with %v", err)
	}
}

// A mover is started by an agent only.
func TestMoverByHand(t *testing.T) {
	out, code := kvagentOutput(t, "mover")
	if code != exitFailed || !strings.Contains(out, "started by an agent") {
		t.Errorf("exit %d, want %d and a hint:\n%s", code, exitFailed, out)
	}
}

// A mover that somebody kills while it starts is started again, as one that is killed later is; not
// for ever.
func TestMoverKilledInItsStart(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		kills string // how many starts are killed
		good  bool
	}{"once": {"1", true}, "always": {"1000", false}} {
		count := filepath.Join(t.TempDir(), "starts")
		script := `echo >>"$0"; if [ $(wc -l <"$0") -le "$1" ]; then kill -KILL $$; fi; exec "$2" mover`
		m := testMover(t, "sh", "-c", script, count, test.kills, self)
		err := startMover(m)
		if (err == nil) != test.good {
			t.Errorf("killed %s: %v, want a mover: %v", name, err, test.good)
		}
		starts := m.Movers()[0].Starts
		if want := map[bool]uint64{true: 2, false: startTries}[test.good]; starts != want {
			t.Errorf("killed %s: %d starts, want %d", name, starts, want)
		}
		if err := m.Close(cudaipc.AllPeers); err != nil {
			t.Errorf("killed %s: Close: %v", name, err)
		}
	}
}

func testMover(t *testing.T, command ...string) *mover.Mover {
	t.Helper()
	fd, err := unix.MemfdCreate("arena", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }() // the mover has its own
	if err := unix.Ftruncate(fd, 1<<20); err != nil {
		t.Fatal(err)
	}
	m, err := mover.New(mover.Options{
		Name: "host", Device: cudaipc.HostDevice, ArenaFD: fd, ArenaSize: 1 << 20, Node: -1, Command: command,
		Env:    []string{asCommand + "=1"},
		Limits: mover.Limits{Again: 10 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}
