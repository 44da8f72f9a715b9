package agent

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// registering is a registration whose parts have not all arrived. Its seat is taken.
type registering struct {
	*registration.Gathering
	seat  *seat
	timer *time.Timer // ends the session
}

// registerLocked serves REGISTER. It takes the seat at once; the rest happens when all parts have
// arrived. An invalid registration is refused and the session stays; a message out of order ends
// the session.
func (s *session) registerLocked(m *ipc.Register) error {
	if s.seat.Load() != nil || s.mu.reg != nil {
		return unexpected("REGISTER", "req", "the session has a registration, allowed is one until UNREGISTER")
	}
	err := registration.Check(m, s.owner.cfg.Dir)
	if err == nil && s.owner.switches.draining() {
		err = errors.New("the agent is shutting down")
	}
	var st *seat
	if err == nil {
		st, err = s.owner.registry.admit(s, m, s.ending)
	}
	if err != nil {
		s.refuseLocked(m, err)
		return nil
	}
	s.mu.reg = &registering{Gathering: registration.New(m), seat: st,
		timer: time.AfterFunc(s.owner.cfg.Limits.Parts, func() {
			s.terminate(endLimit, ipc.ErrCodeLimit,
				fmt.Errorf("the parts of REGISTER did not come within %v", s.owner.cfg.Limits.Parts))
		})}
	s.partLocked(nil)
	return nil
}

// regionsLocked serves REGIONS. It ignores those of a registration that was refused or withdrawn
// while they were in flight.
func (s *session) regionsLocked(m *ipc.Regions, fds []int) {
	if s.mu.reg == nil || s.mu.reg.Msg.Req != m.Req {
		registration.CloseFDs(fds)
		return
	}
	pending := s.owner.memory.pendingFDs.Add(int64(len(fds)))
	err := s.mu.reg.AddRegions(m, fds)
	if most := s.owner.memory.maxPending; err == nil && pending > most {
		err = fmt.Errorf("regions: more than %d descriptors wait in registrations that are not complete", most)
	}
	s.partLocked(err)
}

// segmentsLocked serves SEGMENTS as regionsLocked does REGIONS.
func (s *session) segmentsLocked(m *ipc.Segments) {
	if s.mu.reg != nil && s.mu.reg.Msg.Req == m.Req {
		s.partLocked(s.mu.reg.AddSegments(m))
	}
}

// partLocked finishes a registration once all its parts have arrived, or refuses it for an error of
// one.
func (s *session) partLocked(err error) {
	reg := s.mu.reg
	if err == nil && !reg.Complete() {
		return
	}
	reg.timer.Stop()
	var path string
	if err == nil {
		path, err = s.install(reg)
	}
	if err != nil {
		s.leaveLocked()
		s.refuseLocked(&reg.Msg, err)
		return
	}
	s.mu.reg = nil
	s.owner.metrics.Registrations[report.ResultDone].Add(1)
	s.log.Info("registered", zap.String("instance", reg.Msg.Instance),
		zap.String("as", placeName(reg.Msg.Role, reg.Msg.Rank)),
		zap.Uint32("world", reg.Msg.World), spaceField(reg.seat.space.fp), zap.String("model", reg.seat.space.model),
		zap.Int("regions", reg.seat.regions), zap.String("lookup", path))
	s.answer(&ipc.Registered{
		Req: reg.Msg.Req, Status: ipc.RegDone, Space: reg.seat.space.fp,
		Epoch: s.owner.registry.epochOf(reg.seat.space), LookupPath: path,
	})
}

// install turns a complete registration into a registered seat. After an error, leaveLocked
// undoes what it did.
func (s *session) install(reg *registering) (path string, err error) {
	st := reg.seat
	if st.role == ipc.RoleWorker {
		if st.layouts, st.sizes, err = reg.Layouts(); err != nil {
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
	s.seat.Store(st) // before activate, after which a worker may complete jobs
	return path, s.owner.registry.activate(st, s.owner.workers.start)
}

// open imports all of the worker's regions, or none.
func (s *session) open(reg *registering) error {
	st, m := reg.seat, s.owner.memory
	count, bytes := reg.Size()
	err := m.take(count, bytes)
	if err == nil {
		var peer cudaipc.Peer
		if peer, err = s.importRegions(reg); err == nil {
			st.peer, st.regions, st.bytes = peer, count, bytes
			return nil
		}
		m.give(count, bytes)
	}
	return fmt.Errorf("regions: %w", err)
}

func (s *session) importRegions(reg *registering) (cudaipc.Peer, error) {
	proof, err := s.conn.Hold()
	if err != nil {
		return nil, err
	}
	s.owner.memory.pendingFDs.Add(-int64(reg.FDs()))
	im := reg.Imports(s.pid)
	reg.seat.gpu, im.Proof = im.GPU, proof
	gone, unwatch := s.watchHangup()
	defer unwatch()
	im.Cancelled, im.Lost = gone, s.lostMemory
	return s.owner.memory.device.Import(im)
}

// leaveLocked undoes the session's registration, also one whose parts have not all arrived, and
// returns its seat; nil: there is none.
func (s *session) leaveLocked() *seat {
	st := s.seat.Load()
	if reg := s.mu.reg; reg != nil {
		reg.timer.Stop()
		s.owner.memory.pendingFDs.Add(-int64(reg.FDs()))
		reg.Drop()
		st, s.mu.reg = reg.seat, nil
	}
	if st != nil {
		s.owner.vacate(st)
		s.seat.Store(nil)
	}
	return st
}

// refuseLocked answers a refused registration.
func (s *session) refuseLocked(m *ipc.Register, err error) {
	status, result := uint8(ipc.RegRefused), report.ResultRefused
	if errors.Is(err, pool.ErrIdentity) {
		status, result = ipc.RegClash, report.ResultClash
	}
	s.owner.metrics.Registrations[result].Add(1)
	s.log.Warn("registration refused", zap.String("instance", m.Instance), zap.Error(err))
	s.answer(&ipc.Registered{Req: m.Req, Status: status, Text: err.Error()})
}

// hangupPoll is the interval at which a running import checks that its engine still exists: the
// session's socket is not read meanwhile.
const hangupPoll = 20 * time.Millisecond

// watchHangup returns a channel that is closed when the peer has died or hung up, or the session is
// to end. unwatch stops the watch.
func (s *session) watchHangup() (gone <-chan struct{}, unwatch func()) {
	noticed, over, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer close(noticed)
		tick := time.NewTicker(hangupPoll)
		defer tick.Stop()
		for !s.conn.HungUp() {
			select {
			case <-over:
				return
			case <-s.ending:
				return
			case <-s.conn.Dead():
				return
			case <-tick.C:
			}
		}
	}()
	return noticed, func() {
		close(over)
		<-ended
	}
}
