package agent

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// registering is a registration whose parts have not all come: its seat is taken.
type registering struct {
	*registration.Gathering
	seat  *seat
	timer *time.Timer // ends the session
}

// registerLocked serves REGISTER: the seat is taken at once, the rest when all parts have come. What is wrong with a
// registration refuses it and leaves the session; what may not come now ends the session.
func (s *session) registerLocked(m *ipc.Register) error {
	if s.seat.Load() != nil || s.mu.reg != nil {
		return unexpected("REGISTER", "req", "the session has a registration, allowed is one until UNREGISTER")
	}
	s.mu.passed = registration.Left{}
	err := registration.Check(m, s.owner.dir)
	if err == nil && s.owner.switches.draining() {
		err = errors.New("the agent is shutting down")
	}
	var st *seat
	if err == nil {
		st, err = s.owner.registry.admit(s, m, s.gone)
	}
	if err != nil {
		s.refuseLocked(registration.LeftOf(m), m.Instance, err)
		return nil
	}
	s.mu.reg = &registering{Gathering: registration.New(m), seat: st, timer: time.AfterFunc(s.owner.limits.Parts, func() {
		s.doom(endLimit, ipc.ErrCodeLimit, fmt.Errorf("the parts of REGISTER did not come within %v", s.owner.limits.Parts))
	})}
	s.completeLocked()
	return nil
}

// regionsLocked serves REGIONS.
func (s *session) regionsLocked(m *ipc.Regions, fds []int) error {
	if s.mu.reg == nil || s.mu.reg.Msg.Req != m.Req {
		registration.CloseFDs(fds)
		return s.passLocked("REGIONS", m.Req, &s.mu.passed.Regions, len(m.List))
	}
	if err := s.addRegionsLocked(m, fds); err != nil {
		s.refusePartsLocked(err)
		return nil
	}
	s.completeLocked()
	return nil
}

// addRegionsLocked adds regions to the registration, and counts their descriptors, also those of a
// message that panics.
func (s *session) addRegionsLocked(m *ipc.Regions, fds []int) (err error) {
	before := s.mu.reg.FDs()
	defer func() {
		if s.owner.memory.pendingFDs.Add(int64(s.mu.reg.FDs()-before)) > s.owner.memory.maxPending && err == nil {
			err = fmt.Errorf("regions: more than %d descriptors wait in registrations that are not complete",
				s.owner.memory.maxPending)
		}
	}()
	return s.mu.reg.AddRegions(m, fds)
}

// segmentsLocked serves SEGMENTS.
func (s *session) segmentsLocked(m *ipc.Segments) error {
	if s.mu.reg == nil || s.mu.reg.Msg.Req != m.Req {
		return s.passLocked("SEGMENTS", m.Req, &s.mu.passed.Segments, len(m.List))
	}
	if err := s.mu.reg.AddSegments(m); err != nil {
		s.refusePartsLocked(err)
		return nil
	}
	s.completeLocked()
	return nil
}

// passLocked takes a part of a registration that is refused already: it was on its way.
func (s *session) passLocked(message string, req uint32, left *uint32, n int) error {
	if s.mu.passed.Req != req || !registration.Take(left, n) {
		return unexpected(message, "req", "%d, allowed is that of the REGISTER whose parts are to come", req)
	}
	return nil
}

// completeLocked ends a registration whose parts have all come.
func (s *session) completeLocked() {
	if !s.mu.reg.Complete() {
		return
	}
	reg := s.mu.reg
	reg.timer.Stop()
	path, err := s.settle(reg)
	if err != nil {
		s.refusePartsLocked(err)
		return
	}
	s.mu.reg = nil
	s.owner.metrics.Registrations[admin.ResultDone].Add(1)
	s.log.Info("registered", zap.String("instance", reg.Msg.Instance), zap.String("as", placeName(reg.Msg.Role, reg.Msg.Rank)),
		zap.Uint32("world", reg.Msg.World), spaceField(reg.seat.space.fp), zap.String("model", reg.seat.space.model),
		zap.Int("regions", reg.seat.regions), zap.String("lookup", path))
	s.answer(&ipc.Registered{
		Req: reg.Msg.Req, Status: ipc.RegDone, Space: reg.seat.space.fp,
		Epoch: s.owner.registry.epochOf(reg.seat.space), LookupPath: path,
	})
}

// settle turns a whole registration into a seat that counts. On an error refusePartsLocked undoes what it did.
func (s *session) settle(reg *registering) (path string, err error) {
	st := reg.seat
	if st.role == ipc.RoleWorker {
		if st.layout, st.sizes, err = reg.Layout(); err != nil {
			return "", err
		}
		if err = s.owner.registry.claim(st); err != nil {
			return "", err
		}
		if err = s.open(reg); err != nil {
			return "", err
		}
	}
	if path, err = s.owner.sockets.open(reg.Msg.LookupName, st); err != nil {
		return "", err
	}
	s.seat.Store(st) // before activate: from then on a worker may complete jobs
	return path, s.owner.registry.activate(st, s.owner.workers.start)
}

// open imports the worker's regions, all or none.
func (s *session) open(reg *registering) error {
	st := reg.seat
	count, bytes := reg.Pieces(), reg.Bytes()
	if err := s.owner.memory.mappings.take(count, bytes); err != nil {
		return fmt.Errorf("regions: %w", err)
	}
	if err := s.importRegions(reg); err != nil {
		s.owner.memory.mappings.give(count, bytes)
		return fmt.Errorf("regions: %w", err)
	}
	st.regions, st.bytes = count, bytes
	return nil
}

func (s *session) importRegions(reg *registering) error {
	proof, err := s.conn.Hold()
	if err != nil {
		return err
	}
	peer := s.owner.memory.peers.take(s)
	s.owner.memory.pendingFDs.Add(-int64(reg.FDs()))
	im := reg.Imports(peer, s.pid)
	im.Proof = proof
	gone, unwatch := s.watchGone()
	defer unwatch()
	im.Cancelled = gone
	if err := s.owner.memory.device.Import(im); err != nil {
		s.owner.memory.peers.give(peer)
		return err
	}
	reg.seat.peer, reg.seat.gpu = peer, reg.GPU()
	return nil
}

// refusePartsLocked ends a registration that holds a seat.
func (s *session) refusePartsLocked(err error) {
	reg := s.mu.reg
	s.abandonLocked()
	s.refuseLocked(reg.Left, reg.Msg.Instance, err)
}

// abandonLocked undoes a registration that is not complete.
func (s *session) abandonLocked() {
	reg := s.mu.reg
	reg.timer.Stop()
	s.owner.memory.pendingFDs.Add(-int64(reg.FDs()))
	reg.Drop()
	s.mu.reg = nil
	s.owner.vacate(reg.seat)
	s.seat.Store(nil)
}

// refuseLocked answers a registration that is not to be; parts of it that are on their way will be passed over.
func (s *session) refuseLocked(left registration.Left, instance string, err error) {
	s.mu.passed = left
	status, result := uint8(ipc.RegRefused), admin.ResultRefused
	if errors.As(err, new(clashError)) || errors.Is(err, pool.ErrIdentity) {
		status, result = ipc.RegClash, admin.ResultClash
	}
	s.owner.metrics.Registrations[result].Add(1)
	s.log.Warn("registration refused", zap.String("instance", instance), zap.Error(err))
	s.answer(&ipc.Registered{Req: left.Req, Status: status, Text: cutText(err.Error())})
}

// cutText fits a text into a message.
func cutText(t string) string {
	for len(t) > ipc.MaxText {
		t = t[:len(t)-1]
		for len(t) > 0 && t[len(t)-1]&0xC0 == 0x80 {
			t = t[:len(t)-1]
		}
	}
	return t
}

// goneLook is how often an import under way looks whether its engine is still there: nobody reads
// the session's socket meanwhile.
const goneLook = 20 * time.Millisecond

// watchGone gives a channel that is closed when the peer has died or hung up, or the session is to
// end. unwatch ends the watch.
func (s *session) watchGone() (gone <-chan struct{}, unwatch func()) {
	noticed, over, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(goneLook)
		defer tick.Stop()
		for !s.conn.HungUp() {
			select {
			case <-over:
				return
			case <-s.gone:
				close(noticed)
				return
			case <-s.conn.Dead():
				close(noticed)
				return
			case <-tick.C:
			}
		}
		close(noticed)
	}()
	return noticed, func() {
		close(over)
		<-ended
	}
}
