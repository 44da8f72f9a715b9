package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/cudaipc/node"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/settings"
	"github.com/kvagent/kvagent/takeover"
	"github.com/kvagent/kvagent/transfer/pace"
)

// serve runs an agent until a signal ends it. It takes the directory first, so that a second agent
// is refused before it takes memory for a pool. It closes what it opened in the opposite order: the
// agent, the peers, the tiers, the device that maps the pool's arena, the pool.
func serve(ctx context.Context, s *serveSettings, log *zap.Logger) (err error) {
	defer runtime.KeepAlive(raiseHeap())
	signal.Ignore(syscall.SIGPIPE) // a reader of the log that exits must not end the agent
	cfg, join, err := s.agentConfig()
	if err != nil {
		return settings.Invalid(err)
	}
	over := func() {}
	defer func() { over() }() // after everything below is closed
	take := takeover.New(takeoverWait, log)
	if join.HTTP.Admin, err = take.Admin(ctx, cfg.Dir, cfg.SocketGroup); err != nil {
		return serveError(err)
	}
	lock := join.HTTP.Admin.Lock
	defer func() { _ = lock.Close() }() // the next agent finds the pool's and the tiers' files free
	join.HTTP.Admin.Lock = nil
	defer func() { _ = join.HTTP.Admin.Close() }() // the agent has closed it if it ran
	var pages sync.WaitGroup
	defer pages.Wait() // after the pool is closed
	p, abandoned, err := take.Pool(ctx, s.dramPath, func(abandon bool) (*dram.Pool, error) {
		return openPool(s, abandon, join.History, log)
	})
	if err != nil {
		return serveError(err)
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	logPool(p, s, log)
	cfg.Abandoned = abandoned
	pages.Go(func() { logPages(p, log) })
	arena, fd := p.Arena()
	device, err := openDevice(s, arena, fd, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	noSums := s.integrity == settings.IntegrityHeader
	stack, closeTiers, err := s.tiers.Open(p, noSums, func(ctx context.Context, bytes int64) func() {
		return cfg.CPUPacer.Await(ctx, pace.Behind, bytes)
	}, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeTiers()) }()
	others, err := s.peers.Open(p, stack, noSums, &join.Peers, log, agent.Rarely(log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, others.Close()) }()
	cfg.PeerAddress = join.Peers.Address
	a, err := agent.New(cfg, stack, device, log)
	if err != nil {
		return settings.Invalid(err)
	}
	joined := guests.Join(a, stack, join, log)
	a.Plug(joined)
	if err := others.Serve(joined); err != nil {
		return err
	}
	ctx, now, stop := untilSignal(ctx, log)
	defer stop()
	ctx, endRun := context.WithCancel(ctx)
	defer endRun()
	if s.endIdle > 0 {
		pages.Go(func() {
			if untilIdle(ctx, s.endIdle, a.Sessions) {
				log.Info("no session has been open for long (end-idle)", zap.Duration("limit", s.endIdle))
				endRun()
			}
		})
	}
	over = boundEnd(ctx, now, s.drainTimeout, log)
	return serveError(a.Run(ctx, now, s.drainTimeout))
}

// serveError adds the exit code to an error.
func serveError(err error) error {
	switch {
	case errors.Is(err, socketdir.ErrInUse), errors.As(err, new(*dram.HeldError)):
		return exitError{exitHeld, err}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return exitError{exitCut, err}
	}
	return err
}

func openPool(s *serveSettings, abandon bool, h *history.History, log *zap.Logger) (*dram.Pool, error) {
	o := dram.Options{Bytes: s.pool, Advisor: advisor.New(evict.Named(s.eviction), nil), Path: s.dramPath, Left: h.Left}
	o.Abandon = abandon
	rare := agent.Rarely(log)
	o.BadPage = func(page dram.BadPage) {
		rare.Error("a page of the pool cannot be read: it is not used any more", zap.Int64("offset", page.Off),
			zap.Int64("bytes", page.Bytes), zap.Int("blocks_dropped", page.Dropped), zap.Int64("bad_pages", page.Pages))
	}
	o.SpaceNotKept = func(space pool.Fingerprint) {
		log.Warn("the pool's file has no room for the description of a space: its blocks end with this process",
			zap.String("path", s.dramPath), zap.String("space", hex.EncodeToString(space[:])))
	}
	if s.hugePages == hugeOff {
		o.HugePages = dram.Off
	}
	o.Nodes, _ = s.gpuNodes()
	p, err := dram.Open(o)
	if err != nil {
		o.Advisor.Close()
		err = fmt.Errorf("pool: %s: %w", settings.FormatSize(s.pool), err)
	}
	if errors.Is(err, pool.ErrTooLarge) {
		err = settings.Invalid(err)
	}
	return p, err
}

// gpuNodes returns the NUMA nodes for the pool's memory, or the reason why there are none.
func (s *serveSettings) gpuNodes() ([]int, string) {
	if s.device == settings.DeviceHost {
		return nil, "the agent was started with --device host"
	}
	return node.NUMANodes()
}

// logPages logs when all of the pool's memory is populated, and why its pages are not huge.
func logPages(p *dram.Pool, log *zap.Logger) {
	begin := time.Now()
	if err := p.Populated(); err != nil {
		log.Warn("the pool's memory is not fully populated", zap.Error(err))
		return
	}
	if info := p.Info(); p.Stats().Ready == info.Bytes { // else the agent ends before that
		log.Info("the pool's memory is populated", zap.Duration("took", time.Since(begin)),
			zap.String("none_set_aside", info.PageReason))
	}
}

// logPool logs the effect of the pool's settings, and the state of its file.
func logPool(p *dram.Pool, s *serveSettings, log *zap.Logger) {
	info := p.Info()
	placed := info.Placement
	if placed == "" {
		_, why := s.gpuNodes()
		placed = "anywhere: " + why
	}
	log.Info("pool", zap.String("size", settings.HumanSize(info.Bytes)),
		zap.String("slabs", settings.HumanSize(info.SlabBytes)),
		zap.String("eviction", s.eviction), zap.String("pages", settings.HumanSize(info.PageBytes)),
		zap.String("memory", placed))
	r := info.Recovery
	if r == nil {
		return
	}
	for _, note := range r.Notes {
		log.Warn("pool file", zap.String("path", r.Path), zap.String("note", note))
	}
	if r.Cold != "" {
		log.Warn("pool file is not used, the pool starts empty", zap.String("path", r.Path), zap.String("why", r.Cold))
		return
	}
	log.Info("pool file", zap.String("path", r.Path), zap.Bool("new", r.New), zap.Int("blocks", r.Entries),
		zap.Int("spaces", r.Spaces),
		zap.Int("damaged", r.Damaged), zap.Int("stale", r.Stale), zap.Int("partial", r.Partial),
		zap.Int("lost_headers", r.Lost), zap.Duration("took", r.Took))
}

// untilSignal returns a context that the first SIGTERM or SIGINT ends, and one that the second
// ends. A third has its default effect. stop ends the watching.
func untilSignal(ctx context.Context, log *zap.Logger) (first, second context.Context, stop func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	first, endFirst := context.WithCancel(ctx)
	second, endSecond := context.WithCancel(context.WithoutCancel(ctx))
	ended, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		defer signal.Stop(signals)
		for _, end := range []func(){endFirst, endSecond} {
			select {
			case sig := <-signals:
				log.Info("signal", zap.Stringer("signal", sig))
				end()
			case <-ended:
				return
			}
		}
	}()
	return first, second, func() {
		close(ended)
		<-watched
		endFirst()
		endSecond()
	}
}

// heapFloor is the size of a heap object that is never touched, bytes; it costs only address space.
// The index lies off the heap, so the heap is a few MiB and 4 MiB of garbage would start a
// collection: several a second with a shared tier, and each delays look-ups on a busy machine. With
// the floor a collection starts after 64 MiB.
const heapFloor = 64 << 20

// raiseHeap returns the floor, which takes effect as long as it is kept alive.
func raiseHeap() []byte { return make([]byte, heapFloor) }
