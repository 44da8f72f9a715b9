package main

import (
	"context"
	"os"
	"sync"
	"time"

	"go.uber.org/zap"
)

// endWithin bounds the end of an agent after --drain-timeout: a mover closes its regions or is
// killed and reaped, and the kernel unmaps a large pool. With the default of --drain-timeout the
// sum is less than the 30 s that Kubernetes gives.
var endWithin = 15 * time.Second

// reportWithin bounds the time to report it.
const reportWithin = time.Second

// endBound ends the process when its end takes too long, because a mover in a driver call that does
// not return cannot be reaped. The fence stays valid: the mover still holds the engines' sockets,
// so engines do not take their memory for free. The agent's own files are as after a kill.
type endBound struct {
	over    chan struct{}
	watched sync.WaitGroup
}

func newEndBound() *endBound { return &endBound{over: make(chan struct{})} }

// watch begins when ctx is done; the end of now ends the drain. movers returns the running movers.
func (b *endBound) watch(ctx, now context.Context, drain time.Duration, movers func() []int, log *zap.Logger) {
	b.watched.Go(func() {
		if !outlasts(ctx, now, drain, b.over) {
			return
		}
		log.Error("the end takes too long: the agent exits at once, and processes that do not end become orphans",
			zap.Ints("movers", within(reportWithin, movers)), zap.Duration("waited", endWithin))
		_ = log.Sync() // stderr has nothing to sync
		os.Exit(exitCut)
	})
}

// within returns f's result, or nil if it takes too long; the blocked end may hold the locks that f
// needs.
func within(most time.Duration, f func() []int) []int {
	answer := make(chan []int, 1)
	go func() { answer <- f() }() // ends with the process
	select {
	case list := <-answer:
		return list
	case <-time.After(most):
		return nil
	}
}

// close reports that everything has ended.
func (b *endBound) close() {
	close(b.over)
	b.watched.Wait()
}

// outlasts waits until over is closed and returns false, or returns true if the end takes too long.
func outlasts(ctx, now context.Context, drain time.Duration, over <-chan struct{}) bool {
	select {
	case <-ctx.Done():
	case <-over:
		return false
	}
	drained := time.NewTimer(drain)
	defer drained.Stop()
	select {
	case <-drained.C:
	case <-now.Done():
	case <-over:
		return false
	}
	bound := time.NewTimer(endWithin)
	defer bound.Stop()
	select {
	case <-bound.C:
		return true
	case <-over:
		return false
	}
}

// idleLooks is how often, at least, the sessions are looked at within --end-idle, and idleLook the
// longest pause between two looks. The agent ends at most one pause late, and never early.
const (
	idleLooks = 16
	idleLook  = time.Second
)

// untilIdle returns true when no session has been open for as long as limit, which counts from now,
// and false when ctx is done. sessions returns how many are open, and the newest one's number.
func untilIdle(ctx context.Context, limit time.Duration, sessions func() (open int, newest uint64)) bool {
	_, last := sessions()
	since := time.Now()
	look := time.NewTicker(min(max(limit/idleLooks, time.Millisecond), idleLook))
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-look.C:
		}
		switch open, newest := sessions(); {
		case open > 0 || newest != last:
			last, since = newest, time.Now()
		case time.Since(since) >= limit:
			return true
		}
	}
}
