//go:build cuda

package cuda

import (
	"fmt"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/pagefault"
)

var _ cudaipc.Recorder = (*Device)(nil)

// loadEvents are the events that report a peer's loads.
type loadEvents struct {
	events []driver.Event
	off    uint64 // of the words, in the sync region
}

// LoadEvents makes events for a peer: see cudaipc.Recorder.
func (d *Device) LoadEvents(id cudaipc.PeerID, off uint64, count uint32) ([]byte, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	p, err := d.table.Begin(id)
	if err != nil {
		return nil, err
	}
	defer p.Release()
	if err := p.CheckLoadEvents(off, count); err != nil {
		return nil, err
	}
	var handles []byte
	d.opener.Do(func() { handles, err = p.makeLoadEvents(off, count) })
	if err != nil {
		return nil, fmt.Errorf("peer %d: load events: %w", id, d.judge(err))
	}
	return handles, nil
}

// makeLoadEvents makes all events or none. The opener calls it.
func (p *peer) makeLoadEvents(off uint64, count uint32) ([]byte, error) {
	if p.loads.Load() != nil {
		return nil, fmt.Errorf("they are there already: %w", cudaipc.ErrBusy)
	}
	l := &loadEvents{off: off}
	var handles []byte
	for range count {
		handle, err := l.add()
		if err != nil {
			l.close()
			return nil, err
		}
		handles = append(handles, handle[:]...)
	}
	p.loads.Store(l)
	return handles, nil
}

func (l *loadEvents) add() (driver.Handle, error) {
	e, err := driver.NewEvent(true)
	if err != nil {
		return driver.Handle{}, err
	}
	l.events = append(l.events, e)
	return e.Export()
}

// close destroys the events: the peer has died or has closed. An event that cannot be destroyed
// ends with this process.
func (l *loadEvents) close() {
	for _, e := range l.events {
		_ = e.Destroy()
	}
}

// recordLoad records a load's event after all of its calls, and then writes its word. A load
// without an event is reported by its end alone.
func (l *lane) recordLoad(f *flight) {
	to := f.of.loads.Load()
	if to == nil || f.copy.Serial == 0 || f.err != nil {
		return
	}
	i := f.copy.Serial % uint64(len(to.events))
	if err := l.d.judge(to.events[i].Record(l.stream)); err != nil {
		return
	}
	words := f.of.Words
	// A peer that truncated its words gets no report.
	_ = pagefault.Guard(words, words, func() { atomic.StoreUint64(cudaipc.Word64(words, to.off+8*i), f.copy.Serial) })
}
