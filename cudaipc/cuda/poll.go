//go:build cuda

package cuda

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// Poll answers a wait now. It reads the words first, without the driver. It asks an event only if
// the awaited step has been reached and the peer is alive: the answer for an event of a dead
// process is undefined. So the pending events of a dead process never fire. It reads the words
// again if the event has fired: they now are what the engine's stream wrote before it.
func (p *peer) Poll(w cudaipc.Wait) (s cudaipc.State, err error) {
	d := p.d
	if err := d.alive(); err != nil {
		return s, err
	}
	err = p.Use(func() (err error) {
		var ask, fired bool
		s, ask, err = p.PollStep(w)
		if err != nil || !ask || p.Dead() {
			return err
		}
		d.asker.Do(func() { fired, err = p.events[w.Event].Fired() })
		if err := d.judge(err); err != nil {
			return fmt.Errorf("event %d: %w: %w", w.Event, err, cudaipc.ErrPeer)
		}
		if fired {
			w.Event = cudaipc.None
			return p.PollWords(&w, &s)
		}
		return nil
	})
	return s, err
}

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
