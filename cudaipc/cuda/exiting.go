//go:build cuda

package cuda

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// watchMemory opens the process's statm, which shows whether it still has its memory. Where statm
// is missing or not the process's (another /proc), only the pidfd counts.
func (p *peer) watchMemory() {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/statm", p.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	if p.statm = fd; p.memoryGone() {
		p.closeStatm()
	}
}

func (p *peer) closeStatm() {
	if p.statm >= 0 {
		_ = unix.Close(p.statm)
		p.statm = -1
	}
}

// memoryGone reports whether the process has released its memory. An open statm stays bound to
// its process, even if the number is reused.
func (p *peer) memoryGone() bool {
	if p.statm < 0 {
		return false
	}
	var text [1]byte
	n, err := unix.Pread(p.statm, text[:], 0)
	return err != nil && err != unix.EINTR || err == nil && n == 0 || text[0] == '0'
}

// exiting reports whether the peer's process has ended or is ending. A process releases its
// memory first, then its files, with what the driver holds for it; only then its pidfd reports
// the end.
func (p *peer) exiting() bool { return p.memoryGone() || p.Dead() }
