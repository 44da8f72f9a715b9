package admin

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// stalledReader is how long the reader of /events may read nothing before it is disconnected.
const stalledReader = time.Minute

// EventOff is the event of the first line of /events where no engine has KV events on.
const EventOff = "off"

// EventLine is one line of /events, as JSON. Hashes are in hex.
type EventLine struct {
	Time   time.Time `json:"time"`
	Event  string    `json:"event"` // EventOff, or one of package events' kinds
	Space  string    `json:"space,omitempty"`
	Model  string    `json:"model,omitempty"`
	Tenant string    `json:"tenant,omitempty"`
	Blocks int       `json:"blocks,omitempty"` // of missed: transitions
	Group  *uint8    `json:"group,omitempty"`  // this and the rest: of stored and removed
	Medium string    `json:"medium,omitempty"` // as events name it
	First  string    `json:"first,omitempty"`
	Last   string    `json:"last,omitempty"`
	Parent string    `json:"parent,omitempty"` // hash before the first
	Tokens int       `json:"tokens,omitempty"`
	Before *int      `json:"tokens_before,omitempty"` // of the chain before the first; absent: not known
}

// mediumNames are the media as KV events name them.
var mediumNames = map[uint8]string{ipc.MediumMemory: "CPU", ipc.MediumStorage: "STORAGE"}

// eventFeed writes what a tail tells.
type eventFeed struct {
	view   *View
	filter cacheFilter
	names  map[pool.SpaceID]CacheSpace
	out    *json.Encoder
	rc     *http.ResponseController
}

// maxEventNames bounds the names of spaces that are remembered, which outlive the spaces.
const maxEventNames = 4096

// space returns the name of a space; it is empty if the space was closed before it was seen.
func (f *eventFeed) space(id pool.SpaceID) CacheSpace {
	if one, known := f.names[id]; known {
		return one
	}
	if len(f.names) > maxEventNames {
		clear(f.names)
	}
	f.names[id] = CacheSpace{}
	for _, one := range f.view.source.Spaces() {
		if one.Blocks >= 0 {
			f.names[one.ID] = one.CacheSpace
		}
	}
	return f.names[id]
}

func (f *eventFeed) wants(id pool.SpaceID) bool {
	one := f.space(id)
	return f.filter.picks(&one)
}

// write writes lines, and waits until the reader has taken them in.
func (f *eventFeed) write(list []events.Transition) error {
	if err := f.rc.SetWriteDeadline(time.Now().Add(stalledReader)); err != nil {
		return err
	}
	for i := range list {
		line := f.line(&list[i])
		if err := f.out.Encode(&line); err != nil {
			return err
		}
	}
	return f.rc.Flush()
}

func (f *eventFeed) line(t *events.Transition) EventLine {
	sp := f.space(t.Space)
	line := EventLine{
		Time: time.Now(), Event: t.Kind, Space: sp.Space, Model: sp.Model, Tenant: sp.Tenant, Blocks: t.Blocks,
	}
	if t.Kind != events.Stored && t.Kind != events.Removed {
		return line
	}
	line.Group, line.Medium, line.Tokens = &t.Group, mediumNames[t.Medium], t.Tokens
	line.First, line.Last = hex.EncodeToString(t.First), hex.EncodeToString(t.Last)
	line.Parent = hex.EncodeToString(t.Parent)
	if t.Before >= 0 {
		line.Before = &t.Before
	}
	return line
}

// events serves GET /events?follow=on|off&space=&model=&tenant=: a line for each transition.
func (s *Server) events(rw http.ResponseWriter, r *http.Request) {
	f := &eventFeed{
		view: s.view, names: map[pool.SpaceID]CacheSpace{}, out: json.NewEncoder(rw),
		rc: http.NewResponseController(rw),
	}
	follow, err := f.parse(r.URL.Query())
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	tail, err := s.view.source.Tail(follow, f.wants)
	if err != nil {
		http.Error(rw, fmt.Sprintf("events: %v", err), http.StatusTooManyRequests)
		return
	}
	defer tail.Close()
	if err := f.rc.SetReadDeadline(time.Time{}); err != nil { // else the request ends with the server's limit
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/x-ndjson")
	if tail.Off() {
		if f.out.Encode(&EventLine{Time: time.Now(), Event: EventOff}) != nil {
			return
		}
	}
	var list []events.Transition
	for ; err == nil; list, err = tail.Next(r.Context()) {
		if err := f.write(list); err != nil {
			return // the reader has gone, or stalled
		}
	}
	_ = f.write(nil) // the limit of the last lines may be over, and the server writes the end of the answer
}

// parse reads the parameters.
func (f *eventFeed) parse(query url.Values) (follow bool, err error) {
	if values := query["follow"]; len(values) > 0 {
		if follow, err = ParseSwitch("follow", values[len(values)-1]); err != nil {
			return false, err
		}
	}
	query.Del("follow")
	f.filter, err = parseFilter(query)
	return follow, err
}
