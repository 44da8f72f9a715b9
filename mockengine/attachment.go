package mockengine

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// attachment has the sessions of scheduler and ranks with one boot of the agent. It ends when any
// of them does; then the others are ended too. Its blocks are fenced when the agent has ended all
// sessions, because it ends a session only after its last access to them.
type attachment struct {
	number     uint32
	boot       [16]byte
	space      [16]byte
	session    uint64 // the scheduler's, for look-ups
	pid        int    // the agent's
	lookupPath string
	events     chan<- Event

	scheduler *session
	ranks     []*session
	broken    chan struct{}
	breakOnce sync.Once
	running   sync.WaitGroup // readers and writers

	mu struct {
		sync.Mutex
		jobs  map[uint64]*shares
		epoch uint32 // of the space
		ended bool
	}
}

// shares collects the ranks' reports of a job.
type shares struct {
	missing int // ranks
	status  []uint8
	moved   int
}

// attach connects and registers the scheduler and all ranks, or none.
func (l *Link) attach(ctx context.Context) (*attachment, error) {
	ctx, stop := context.WithTimeout(ctx, attachWithin)
	defer stop()
	l.mu.Lock()
	l.mu.attachments++
	number := l.mu.attachments
	l.mu.Unlock()
	a := &attachment{number: number, events: l.events, broken: make(chan struct{})}
	a.mu.jobs = make(map[uint64]*shares)
	for i := -1; i < len(l.ranks.ranks); i++ {
		s, err := l.register(ctx, a, i)
		if err != nil {
			a.hangUp()
			return nil, err
		}
		if i < 0 {
			a.scheduler = s
		} else {
			a.ranks = append(a.ranks, s)
		}
	}
	for _, s := range a.sessions() {
		a.running.Go(func() { a.read(s) })
		a.running.Go(func() { a.write(s) })
	}
	return a, nil
}

// register opens one session and registers it: rank i, or the scheduler with -1.
func (l *Link) register(ctx context.Context, a *attachment, i int) (*session, error) {
	conn, w, err := DialSession(ctx, l.where.Session, "kvbench mock")
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	s := &session{conn: conn, rank: i, out: make(chan any, linkQueue)}
	if err := l.introduce(s); err != nil {
		conn.Close()
		return nil, err
	}
	r, err := s.registered()
	if err == nil && i >= 0 && w.Boot != a.boot {
		err = fmt.Errorf("rank %d: the agent was started anew meanwhile", i)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	if i < 0 {
		a.boot, a.session, a.space, a.lookupPath = w.Boot, w.Session, r.Space, r.LookupPath
		a.pid = conn.Peer().Pid
	}
	a.raise(r.Epoch)
	return s, nil
}

// introduce sends the registration of a session.
func (l *Link) introduce(s *session) error {
	cfg := &l.cfg
	reg := &ipc.Register{
		Req: 1, Instance: cfg.Name, Role: ipc.RoleScheduler, World: uint32(cfg.Ranks), Shards: uint32(cfg.Ranks),
		Identity: identity(cfg), HashTokens: uint32(cfg.BlockTokens),
	}
	for g := range cfg.Groups {
		reg.Groups = append(reg.Groups, ipc.GroupDesc{BlockTokens: uint32(cfg.blockTokens(g)),
			NumBlocks: uint32(cfg.Blocks + 1)})
	}
	if s.rank < 0 {
		reg.LookupName = l.where.LookupName
		return s.conn.Send(reg)
	}
	return s.introduceRank(cfg, reg, l.ranks.ranks[s.rank])
}

// introduceRank sends a rank's registration with its memory and the layout of the blocks. All
// groups share the blocks, so their segments are the same.
func (s *session) introduceRank(cfg *Config, reg *ipc.Register, r *rank) error {
	words, sync := r.SyncDesc()
	reg.Role, reg.Rank, reg.Held = ipc.RoleWorker, uint32(s.rank), []uint32{uint32(s.rank)}
	reg.Sync = &ipc.SyncDesc{Region: uint32(sync.Region), StepOff: sync.StepOff, EventsOff: sync.EventsOff,
		Events: sync.Events, RevokeOff: sync.RevokeOff, Revokes: sync.Revokes}
	regions := []cudaipc.Region{words}
	for _, m := range r.memory {
		regions = append(regions, m.Regions()...)
	}
	reg.Regions, reg.Segments = uint32(len(regions)), uint32(cfg.Groups*len(r.segments))
	if err := s.conn.Send(reg); err != nil {
		return err
	}
	for part := range slices.Chunk(regions, ipc.MaxRegionsMessage) {
		if err := s.showRegions(part, r.gpu); err != nil {
			return err
		}
	}
	for g := range cfg.Groups {
		segments := &ipc.Segments{Req: 1, Shard: reg.Held[0], Group: uint8(g)}
		for i := range r.segments {
			seg := &r.segments[i]
			segments.List = append(segments.List, ipc.SegmentDesc{Region: uint32(seg.region),
				Offset: uint64(seg.offset), Stride: uint64(seg.stride), Bytes: uint32(seg.bytes)})
		}
		if err := s.conn.Send(segments); err != nil {
			return err
		}
	}
	return nil
}

// showRegions sends one REGIONS. The UUID of a GPU is appended to the handles of its memory.
func (s *session) showRegions(list []cudaipc.Region, gpu cudaipc.UUID) error {
	regions, fds := &ipc.Regions{Req: 1}, []int(nil)
	for i := range list {
		r := &list[i]
		d := ipc.RegionDesc{ID: uint32(r.ID), Kind: uint8(r.Kind), Size: r.Size, Addr: r.Addr}
		if r.Kind == cudaipc.KindCUDA || r.Kind == cudaipc.KindCUDAFD {
			d.Handle = slices.Concat(r.Handle, gpu[:])
		}
		if r.Kind == cudaipc.KindFD || r.Kind == cudaipc.KindCUDAFD {
			fds = append(fds, r.FD)
		}
		regions.List = append(regions.List, d)
	}
	return s.conn.Send(regions, fds...)
}

// identity returns everything that changes a block's bytes, sorted by key.
func identity(cfg *Config) []ipc.Pair {
	return []ipc.Pair{
		{Key: "dtype", Value: "mock"}, {Key: "hash", Value: "sha256"}, {Key: "layers", Value: strconv.Itoa(layers)},
		{Key: "model", Value: cfg.Model}, {Key: "tenant", Value: ""}, {Key: "tp", Value: strconv.Itoa(cfg.Ranks)},
	}
}

func (a *attachment) sessions() []*session {
	if a.scheduler == nil {
		return a.ranks
	}
	return append([]*session{a.scheduler}, a.ranks...)
}

// hangUp closes sessions whose registration did not finish: they never had a job.
func (a *attachment) hangUp() {
	for _, s := range a.sessions() {
		s.conn.Close()
	}
}

// session is one of an attachment's connections. Messages are sent through a queue, so that an
// agent that does not read never blocks the engine.
type session struct {
	conn *ipc.Conn
	rank int // -1: the scheduler
	out  chan any
}

// registered waits for the answer to a registration.
func (s *session) registered() (*ipc.Registered, error) {
	for {
		msg, _, err := s.conn.Recv()
		if err != nil {
			return nil, fmt.Errorf("rank %d: %w", s.rank, err)
		}
		switch m := msg.(type) {
		case *ipc.Registered:
			if m.Status != ipc.RegDone {
				return nil, fmt.Errorf("rank %d: registration refused: %s", s.rank, m.Text)
			}
			return m, nil
		case *ipc.Error:
			return nil, fmt.Errorf("rank %d: %w", s.rank, m)
		}
	}
}

// closing ends a session's writer after what is queued.
type closing struct{}

// write sends what is queued. When it fails, or is told to leave, the agent sees the end of the
// stream.
func (a *attachment) write(s *session) {
	defer s.conn.CloseWrite() //nolint:errcheck // it is broken then, and read sees it
	for {
		select {
		case msg := <-s.out:
			if _, ok := msg.(closing); ok {
				return
			}
			if err := s.conn.Send(msg); err != nil {
				a.breakUp()
				return
			}
		case <-a.broken:
			return
		}
	}
}

// read handles the agent's messages until the agent has ended the session.
func (a *attachment) read(s *session) {
	defer a.breakUp()
	for {
		msg, _, err := s.conn.Recv()
		if err != nil {
			return
		}
		switch m := msg.(type) {
		case *ipc.Done:
			a.done(m.Job, m.Status)
		case *ipc.Epoch:
			a.raise(m.Epoch)
		case *ipc.Error:
			a.breakUp()
		}
	}
}

// raise records an epoch of the space. Several sessions report it in any order, and the highest
// counts. The engine's own blocks stay: no reset changes what they hold.
func (a *attachment) raise(epoch uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.epoch = max(a.mu.epoch, epoch)
}

// breakUp ends the attachment: every writer ends its stream.
func (a *attachment) breakUp() { a.breakOnce.Do(func() { close(a.broken) }) }

// leave withdraws the registrations, workers first, and then ends every stream.
func (a *attachment) leave() {
	sessions := a.sessions()
	for i := len(sessions) - 1; i >= 0; i-- {
		a.send(sessions[i], &ipc.Unregister{Req: 2})
		a.send(sessions[i], closing{})
	}
}

// end waits until the agent has ended all sessions, closes them, and reports the jobs that the
// agent still had.
func (a *attachment) end() {
	a.running.Wait()
	a.hangUp()
	a.mu.Lock()
	a.mu.ended = true
	jobs := a.mu.jobs
	a.mu.jobs = nil
	a.mu.Unlock()
	for id := range jobs {
		a.events <- Event{Job: id}
	}
}

// send queues a message. A full queue means that the agent has not read for long: the attachment
// ends.
func (a *attachment) send(s *session, msg any) {
	select {
	case s.out <- msg:
	default:
		a.breakUp()
	}
}

// submit queues a job for all ranks if all have room: only the engine's goroutine adds, so the room
// stays.
func (a *attachment) submit(j *Job) bool {
	for _, s := range a.ranks {
		if len(s.out) >= linkJobs {
			return false
		}
	}
	sections, blocks := wireSections(j)
	a.mu.Lock()
	if a.mu.ended || blocks > ipc.MaxJobBlocks || len(sections) > ipc.MaxSections {
		a.mu.Unlock()
		return false
	}
	a.mu.jobs[j.ID] = &shares{missing: len(a.ranks)}
	epoch := a.mu.epoch
	a.mu.Unlock()
	for _, s := range a.ranks {
		if j.Kind == SaveJob {
			a.send(s, &ipc.Save{Job: j.ID, Epoch: epoch, Step: j.Step, Event: j.Event, Revoke: j.Revoke,
				Sections: sections})
			continue
		}
		load := &ipc.Load{Job: j.ID, Epoch: epoch, Step: j.Step, Event: j.Event, Sections: sections}
		if j.Lease.Attachment == a.number {
			load.Lease = j.Lease.Number
		}
		a.send(s, load)
	}
	return true
}

func wireSections(j *Job) (sections []ipc.Section, blocks int) {
	for _, s := range j.Sections {
		w := ipc.Section{Group: s.Group, Parent: s.Parent, HashLen: uint8(len(s.Hashes) / len(s.Blocks)),
			Hashes: s.Hashes}
		for _, id := range s.Blocks {
			w.Blocks = binary.LittleEndian.AppendUint32(w.Blocks, id)
		}
		sections = append(sections, w)
		blocks += len(s.Blocks)
	}
	return sections, blocks
}

// done joins the ranks' reports; the last one makes the event.
func (a *attachment) done(job uint64, status []byte) {
	a.mu.Lock()
	j := a.mu.jobs[job]
	if j == nil {
		a.mu.Unlock()
		return
	}
	if j.status == nil {
		j.status = append([]uint8{}, status...)
	}
	for i, s := range status {
		if s == blockOK {
			j.moved++
		}
		if i < len(j.status) {
			j.status[i] = worse(j.status[i], s)
		}
	}
	if j.missing--; j.missing > 0 {
		a.mu.Unlock()
		return
	}
	delete(a.mu.jobs, job)
	a.mu.Unlock()
	a.events <- Event{Job: job, Status: j.status, Moved: j.moved}
}

const blockOK, lastSuccess = 0, 2 // statuses of blocks; docs/PROTOCOL.md

// worse joins two ranks' statuses: a failure beats a success, and among successes "stored" is the
// strongest.
func worse(a, b uint8) uint8 {
	if max(a, b) <= lastSuccess {
		return min(a, b)
	}
	return max(a, b)
}
