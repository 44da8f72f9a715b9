package peer

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// reads reports whether blocks of this peer are to be read by one-sided reads: this side's reader
// works, and none failed a short while ago.
func (l *link) reads() bool {
	c := l.client
	if c.cfg.Reader == nil {
		return false
	}
	if _, err := c.cfg.Reader.Exposed(); err != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !time.Now().Before(l.node.reads.until)
}

// receivePlaces reads a PLACES, which must answer the oldest ask, and begins to read the blocks.
func (s *stream) receivePlaces(h header) error {
	a := s.oldest()
	if a == nil || a.id != h.id || !a.pin {
		return malformed("PLACES %d was not asked for", h.id)
	}
	b, err := s.rest(int(h.length))
	if err != nil {
		return err
	}
	m, err := parsePlaces(b)
	if err != nil {
		return err
	}
	if m.outcome == placedOK && len(m.rows) != len(a.parts) {
		return malformed("PLACES of %d blocks, not of %d", len(m.rows), len(a.parts))
	}
	s.pop(a)
	s.link.client.reading.Go(func() { s.pull(a, &m) })
	return nil
}

// pull reads the blocks of an ask, whose slots it owns meanwhile. If that fails, it asks for them
// in frames.
func (s *stream) pull(a *ask, m *places) {
	err := s.pullNow(a, m)
	if m.outcome == placedOK {
		_ = s.send(kindUnpin, a.id, nil) // if it fails, the end of the connection frees them
	}
	if err == nil {
		a.fetch.arrived(a)
		return
	}
	for i := range a.result {
		a.result[i] = cancelled
	}
	a.id, a.pin = s.link.id(), false
	s.ask(a)
}

// Errors of one-sided reads.
var (
	errNoPlaces  = errors.New("the peer's memory cannot be read")
	errFull      = errors.New("the peer has pinned too much")
	errSuspended = errors.New("another read has failed")
	errNoLink    = errors.New("the connection has ended before the read began")
)

// maxPulling bounds the one-sided reads at once, of all peers.
const maxPulling = 8

// pullNow reads the blocks of a PIN. An error is counted before another read may begin; after the
// end of the connection, which has freed the peer's blocks, it says nothing about reads.
func (s *stream) pullNow(a *ask, m *places) (err error) {
	reading := false
	defer func() {
		if err != nil && s.link.reason() == nil {
			s.link.client.countRead(s.link.node, 0, 0, err)
		}
		if reading {
			<-s.link.client.pulling
		}
	}()
	switch m.outcome {
	case placedNone:
		return errNoPlaces
	case placedFull:
		return errFull
	}
	cfg := &s.link.client.cfg
	select {
	case s.link.client.pulling <- struct{}{}:
		reading = true
	case <-s.link.dead:
	}
	if s.link.reason() != nil {
		return errNoLink
	}
	if !s.link.reads() { // since it waited: the peer's bound holds for the reads that have begun
		return errSuspended
	}
	own, err := cfg.Reader.Exposed()
	if err != nil {
		return err
	}
	if own.Protocol != m.protocol {
		return fmt.Errorf("the peer's memory is read by %s, this side reads by %s", m.protocol, own.Protocol)
	}
	var pulls []pool.Pull
	for i := range m.rows {
		if a.result[i] = m.rows[i].status; a.result[i] == pool.OK {
			slot := a.slot(i)
			pulls = append(pulls, pool.Pull{Offset: slot.Off, Length: int64(slot.Len), Address: m.rows[i].address})
		}
	}
	if len(pulls) == 0 {
		return nil
	}
	if err := cfg.Reader.Read(m.target, pulls); err != nil {
		return err
	}
	if err := s.sum(a, m); err != nil {
		return err
	}
	s.link.client.countRead(s.link.node, len(pulls), int64(len(pulls))*int64(a.get.length), nil)
	return nil
}

// sum sums what was read, in the slots. Bytes that do not match are read again in frames, which
// shows whose fault it is.
func (s *stream) sum(a *ask, m *places) error {
	cfg := &s.link.client.cfg
	for i := range m.rows {
		if a.result[i] != pool.OK {
			continue
		}
		slot := a.slot(i)
		mem := cfg.Arena[slot.Off : slot.Off+int64(slot.Len)]
		slot.Sum = a.seed(i)
		if pagefault.Guard(mem, nil, func() { slot.Sum = pool.Sum(slot.Sum, mem) }) != nil {
			cfg.Slots.Probe(*slot)
			a.result[i] = badPage
		} else if slot.Sum != m.rows[i].sum {
			return errors.New("a block that was read does not match its sum")
		}
	}
	return nil
}

// countRead counts a one-sided read of a node, and suspends further ones after a failure.
func (c *Client) countRead(n *node, blocks int, bytes int64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.count.Read, c.count.ReadBytes = c.count.Read+uint64(blocks), c.count.ReadBytes+uint64(bytes)
		n.reads.worked()
		return
	}
	c.count.ReadsFailed++
	if errors.Is(err, errFull) || errors.Is(err, errSuspended) {
		return // it says nothing new about the peer
	}
	if time.Now().Before(n.reads.until) {
		return // of the reads that were under way
	}
	first := !n.reads.suspends()
	if n.reads.failed(err, &c.cfg); !first {
		return
	}
	c.cfg.Log(n.addr, "one-sided reads fail: blocks are sent in frames", err)
}
