package main

import (
	"context"
	"time"
)

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
