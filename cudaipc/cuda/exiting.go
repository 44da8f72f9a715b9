//go:build cuda

package cuda

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// watchMemory opens what says whether the process still has its memory. Where that says nothing at
// the start (no /proc, or one of other processes), the pidfd alone counts.
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

// memoryGone reports whether the process has no memory any more. An open statm is of the process
// that it was opened for, whoever has its number now.
func (p *peer) memoryGone() bool {
	if p.statm < 0 {
		return false
	}
	var text [1]byte
	n, err := unix.Pread(p.statm, text[:], 0)
	return err != nil && err != unix.EINTR || err == nil && n == 0 || text[0] == '0'
}

// dying reports whether the peer's process has ended or is about to: it gives up its memory first,
// then its files, with what the driver holds for it, and only when those are closed does its pidfd
// say that it is dead.
func (p *peer) exiting() bool { return p.memoryGone() || p.Dead() }
