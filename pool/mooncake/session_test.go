package mooncake

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// The helper is in the agent's session, which the kernel schedules as one
// (sched_autogroup_enabled): in one of its own, its client's threads wait for the turns of all
// other sessions each time that one hands work to another, and move next to nothing on a busy
// machine. A terminal's signals do not reach it all the same.
func TestHelperSharesTheSession(t *testing.T) {
	s, _ := openOne(t)
	h, err := s.current()
	if err != nil {
		t.Fatal(err)
	}
	pid := h.cmd.Process.Pid
	own, err := unix.Getsid(0)
	if err != nil {
		t.Fatal(err)
	}
	if sid, err := unix.Getsid(pid); err != nil || sid != own {
		t.Errorf("the helper is in session %d, the agent in %d: %v", sid, own, err)
	}
	if group, err := unix.Getpgid(pid); err != nil || group != pid {
		t.Errorf("the helper %d is in the process group %d: %v", pid, group, err)
	}
	if pid == os.Getpid() {
		t.Error("the helper is the agent")
	}
}
