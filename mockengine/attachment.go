package mockengine

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

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
	epoch      atomic.Uint32
	events     chan<- Event

	scheduler *session
	ranks     []*session
	broken    chan struct{}
	breakOnce sync.Once
	running   sync.WaitGroup // readers and writers

	mu struct {
		sync.Mutex
		jobs  map[uint64]*shares
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
	conn, w, err := ipc.DialSession(ctx, l.where.Session, "kvbench mock", ipc.MinVersion, ipc.Version)
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
	for _, scale := range cfg.Groups {
		reg.Groups = append(reg.Groups, ipc.GroupDesc{BlockTokens: uint32(scale * cfg.BlockTokens),
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
	reg.Regions, reg.Segments = uint32(len(regions)), uint32(len(cfg.Groups)*len(r.segments))
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
		{Key: "dtype", Value: "mock"}, {Key: "hash", Value: "sha256"}, {Key: "layers", Value: strconv.Itoa(cfg.Layers)},
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
