package agent

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/agent/share"
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
		s.refuseLocked(m.Req, m.Instance, err)
		return nil
	}
	s.mu.reg = &registering{Gathering: registration.New(m), seat: st,
		timer: time.AfterFunc(s.owner.cfg.Limits.Parts, func() {
			s.terminate(endLimit, ipc.ErrCodeLimit,
				fmt.Errorf("the parts of REGISTER did not come within %v", s.owner.cfg.Limits.Parts))
		})}
	s.completeLocked()
	return nil
}

// regionsLocked serves REGIONS. Parts of a registration that was refused, which were in flight, are
// ignored.
func (s *session) regionsLocked(m *ipc.Regions, fds []int) {
	if s.mu.reg == nil || s.mu.reg.Msg.Req != m.Req {
		registration.CloseFDs(fds)
		return
	}
	if err := s.addRegionsLocked(m, fds); err != nil {
		s.refusePartsLocked(err)
		return
	}
	s.completeLocked()
}

// addRegionsLocked adds regions to the registration, and counts their descriptors even if the
// message makes it panic.
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

// segmentsLocked serves SEGMENTS, as regionsLocked does REGIONS.
func (s *session) segmentsLocked(m *ipc.Segments) {
	if s.mu.reg == nil || s.mu.reg.Msg.Req != m.Req {
		return
	}
	if err := s.mu.reg.AddSegments(m); err != nil {
		s.refusePartsLocked(err)
		return
	}
	s.completeLocked()
}

// completeLocked finishes a registration once all its parts have arrived.
func (s *session) completeLocked() {
	if !s.mu.reg.Complete() {
		return
	}
	reg := s.mu.reg
	reg.timer.Stop()
	path, err := s.install(reg)
	if err != nil {
		s.refusePartsLocked(err)
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

// install turns a complete registration into a registered seat. After an error, refusePartsLocked
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
	st := reg.seat
	count, bytes := reg.Pieces(), reg.Bytes()
	if err := s.owner.memory.mappings.Take(count, bytes); err != nil {
		return fmt.Errorf("regions: %w", err)
	}
	if err := s.importRegions(reg); err != nil {
		s.owner.memory.mappings.Give(count, bytes)
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
	im.Cancelled = s.ending // also by the death of the engine, which run notices
	if err := s.owner.memory.device.Import(im); err != nil {
		s.owner.memory.peers.give(peer)
		return err
	}
	reg.seat.peer, reg.seat.gpu = peer, reg.GPU()
	return nil
}

// refusePartsLocked refuses a registration that holds a seat.
func (s *session) refusePartsLocked(err error) {
	reg := s.mu.reg
	s.abandonLocked()
	s.refuseLocked(reg.Msg.Req, reg.Msg.Instance, err)
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

// refuseLocked answers a refused registration.
func (s *session) refuseLocked(req uint32, instance string, err error) {
	status, result := uint8(ipc.RegRefused), report.ResultRefused
	if errors.As(err, new(clashError)) || errors.Is(err, pool.ErrIdentity) {
		status, result = ipc.RegClash, report.ResultClash
	}
	s.owner.metrics.Registrations[result].Add(1)
	s.log.Warn("registration refused", zap.String("instance", instance), zap.Error(err))
	s.answer(&ipc.Registered{Req: req, Status: status, Text: err.Error()})
}

// memory opens and closes the engines' memory in the device.
type memory struct {
	device     cudaipc.Device
	mappings   *share.Mappings // the regions
	peers      *peerNumbers    // the workers that own them
	pendingFDs atomic.Int64    // descriptors of registrations that are not complete
	maxPending int64           // such descriptors at once
	log        *zap.Logger
}

// close closes a worker's regions. A copy still in flight means that the worker was closed too
// early. The socket's end must prove that no memory is touched, so close logs that and waits as
// long as it takes.
func (m *memory) close(st *seat) {
	pause := time.NewTicker(closeRetry)
	defer pause.Stop()
	logged := false
	for {
		err := m.device.Close(st.peer)
		if err == nil {
			break
		}
		if !logged {
			logged = true
			m.log.Error("regions do not close", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank),
				zap.Error(err))
		}
		if !errors.Is(err, cudaipc.ErrBusy) {
			return // the number is never used again, and the regions stay counted
		}
		<-pause.C
	}
	m.mappings.Give(st.regions, st.bytes)
	m.peers.give(st.peer)
}

// closeRetry is the pause between attempts to close regions with a copy in flight.
const closeRetry = time.Millisecond

// peerNumbers assigns numbers to the workers whose memory is open. A number is reused only after
// all others have been, and never while its regions are open.
type peerNumbers struct {
	mu   sync.Mutex
	last cudaipc.PeerID
	used map[cudaipc.PeerID]*session // whose memory it is
}

func newPeerNumbers() *peerNumbers { return &peerNumbers{used: make(map[cudaipc.PeerID]*session)} }

func (p *peerNumbers) take(s *session) cudaipc.PeerID {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		p.last++
		if _, taken := p.used[p.last]; !taken && p.last != cudaipc.AllPeers {
			p.used[p.last] = s
			return p.last
		}
	}
}

// owner returns the session of a number, or nil if it is not used.
func (p *peerNumbers) owner(id cudaipc.PeerID) *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used[id]
}

func (p *peerNumbers) give(id cudaipc.PeerID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, id)
}

// lostPeer ends the session of a worker whose memory was open in a mover that has ended. Its copies
// have ended; the engine receives the reason and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.memory.peers.owner(id); s != nil {
		s.terminate(endDevice, ipc.ErrCodeInternal,
			fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
	}
}
