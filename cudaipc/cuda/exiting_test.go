//go:build cuda

package cuda

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// sleeperPeer returns a process with nothing on a GPU, watched as an imported peer is.
func sleeperPeer(tb testing.TB) (*peer, *exec.Cmd) {
	tb.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }) // it may have ended
	p := &peer{statm: -1}
	_ = p.Prepare(&cudaipc.Import{Pid: cmd.Process.Pid})
	if err := p.Watch(); err != nil {
		tb.Fatal(err)
	}
	p.watchMemory()
	tb.Cleanup(func() { p.closeStatm(); p.Unmap() })
	return p, cmd
}

// A process without its memory is exiting before its pidfd reports the end, and also after it is
// reaped and its number is free. A process that is not watched is not exiting.
func TestCUDADying(t *testing.T) {
	p, cmd := sleeperPeer(t)
	if p.statm < 0 || p.memoryGone() || p.exiting() {
		t.Fatal("a living process is dying")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// the end, without the reaping
	for unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
	if !p.Dead() {
		t.Fatal("the killed process lives")
	}
	if !p.memoryGone() { // it is a zombie: there is a statm, of nothing
		t.Error("the memory of a zombie is there")
	}
	_ = cmd.Wait() // it was killed
	if !p.memoryGone() || !p.exiting() {
		t.Error("a reaped process is not dying")
	}
	unwatched := &peer{statm: -1}
	_ = unwatched.Prepare(&cudaipc.Import{Pid: cmd.Process.Pid})
	if unwatched.exiting() {
		t.Error("a process that is not watched is dying")
	}
}

func BenchmarkCUDADying(b *testing.B) {
	p, _ := sleeperPeer(b)
	b.Run("pidfd", func(b *testing.B) {
		for b.Loop() {
			p.Dead()
		}
	})
	b.Run("memory too", func(b *testing.B) {
		for b.Loop() {
			p.exiting()
		}
	})
}
