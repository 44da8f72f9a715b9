package admin

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/history"
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

// RecordLine is a line of /record: a prompt, in the format of traces, or the number of prompts that
// were dropped.
type RecordLine struct {
	Timestamp    float64  `json:"timestamp"`     // ms since the recording began
	InputLength  uint32   `json:"input_length"`  // tokens of whole blocks
	OutputLength uint32   `json:"output_length"` // 0: the agent does not know it
	HashIDs      []uint64 `json:"hash_ids"`      // salted, 63 bits each
	Dropped      uint64   `json:"dropped,omitempty"`
}

// recordFeed writes what a recording passes on.
type recordFeed struct {
	begin time.Time
	salt  [32]byte // forgotten at the end: nobody can find out whether a known prompt is in it
	out   *json.Encoder
	rc    *http.ResponseController
	buf   []byte
}

// record serves GET /record: a line for each prompt that engines ask for, until the reader leaves.
func (s *Server) record(rw http.ResponseWriter, r *http.Request) {
	world := s.view.source.Explain
	if world == nil {
		http.Error(rw, "nothing is remembered", http.StatusNotFound)
		return
	}
	recording, err := world.History.Record()
	if errors.Is(err, history.ErrTooMany) {
		http.Error(rw, err.Error(), http.StatusTooManyRequests)
		return
	}
	defer recording.Close()
	f := &recordFeed{begin: time.Now(), out: json.NewEncoder(rw), rc: http.NewResponseController(rw)}
	_, _ = rand.Read(f.salt[:])                               // it never fails
	if err := f.rc.SetReadDeadline(time.Time{}); err != nil { // else it ends with the server's limit
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/x-ndjson")
	var list []history.Prompt
	var dropped uint64
	for ; err == nil; list, dropped, err = recording.Next(r.Context()) {
		if f.write(list, dropped) != nil {
			return // the reader has gone, or stalled
		}
	}
}

// write writes lines, and waits until the reader has taken them in.
func (f *recordFeed) write(list []history.Prompt, dropped uint64) error {
	if err := f.rc.SetWriteDeadline(time.Now().Add(stalledReader)); err != nil {
		return err
	}
	if dropped > 0 {
		if err := f.out.Encode(&RecordLine{Dropped: dropped}); err != nil {
			return err
		}
	}
	for i := range list {
		p := &list[i]
		ms := float64(p.At.Sub(f.begin).Microseconds()) / 1000
		line := RecordLine{Timestamp: max(ms, 0), InputLength: p.Tokens, HashIDs: make([]uint64, p.Hashes.N)}
		for b := range line.HashIDs {
			line.HashIDs[b] = f.id(p.Space, p.Hashes.At(b))
		}
		if err := f.out.Encode(&line); err != nil {
			return err
		}
	}
	return f.rc.Flush()
}

// id returns the number of a block in the recording: equal for equal blocks of one space.
func (f *recordFeed) id(space pool.Fingerprint, hash []byte) uint64 {
	f.buf = append(append(append(f.buf[:0], f.salt[:]...), space[:]...), hash...)
	sum := sha256.Sum256(f.buf)
	return binary.BigEndian.Uint64(sum[:]) >> 1
}
