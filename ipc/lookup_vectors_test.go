package ipc

import (
	"bytes"
	"encoding/hex"
	"maps"
	"reflect"
	"slices"
	"testing"
)

type requestVector struct {
	Name   string         `json:"name"`
	Form   string         `json:"form"`
	Fields map[string]any `json:"fields"`
	Frames []string       `json:"frames"`
}

type replyVector struct {
	Name   string         `json:"name"`
	Form   string         `json:"form"`
	Fields map[string]any `json:"fields"`
	Hex    string         `json:"hex"`
}

type malformedRequestVector struct {
	Name   string   `json:"name"`
	Form   string   `json:"form"`
	Frames []string `json:"frames"`
	Field  string   `json:"field"`
	Reply  string   `json:"reply"` // with a boot of zeros
}

type lookupFile struct {
	Requests  []requestVector          `json:"requests"`
	Loose     []requestVector          `json:"loose"`
	Replies   []replyVector            `json:"replies"`
	Malformed []malformedRequestVector `json:"malformed"`
}

// formFields are the fields that each form's request and reply carry.
var formFields = map[Form]struct{ request, reply []string }{
	FormMalformed: {nil, []string{"tokens"}},
	FormOwn: {[]string{"version", "space", "session", "want", "tokens", "hbm_tokens", "deadline_us", "groups",
		"hash_len", "hashes", "transfer", "peer", "early"},
		[]string{"version", "status", "tokens", "lease", "boot", "disk", "shared"}},
	FormUpstream: {[]string{"tokens", "hash_len", "hashes"}, []string{"tokens"}},
	FormReset:    {nil, []string{"status"}},
	FormAscend2:  {[]string{"tokens", "hash_len", "hashes"}, []string{"tokens"}},
	FormAscend3:  {[]string{"tokens", "groups", "hash_len", "hashes"}, []string{"tokens"}},
	FormAscend4:  {[]string{"tokens", "groups", "hbm_tokens", "hash_len", "hashes"}, []string{"tokens"}},
	FormSimple:   {[]string{"tokens", "hash_len", "hashes"}, []string{"blocks"}},
}

func pick(fields map[string]any, names []string) map[string]any {
	maps.DeleteFunc(fields, func(k string, _ any) bool { return !slices.Contains(names, k) })
	return fields
}

func requestFields(r *LookupRequest) map[string]any {
	fields := toFields(reflect.ValueOf(*r)).(map[string]any)
	fields["version"] = Version
	return pick(fields, formFields[r.Form].request)
}

func replyFieldsOf(r *LookupRequest, a *LookupReply) map[string]any {
	fields := toFields(reflect.ValueOf(*a)).(map[string]any)
	fields["version"] = Version
	return pick(fields, formFields[r.Form].reply)
}

func hexAll(frames [][]byte) []string {
	all := []string{}
	for _, f := range frames {
		all = append(all, hex.EncodeToString(f))
	}
	return all
}

func framesOf(frames [][]byte) *Frames {
	var f Frames
	for _, b := range frames {
		f.Add(b)
	}
	return &f
}

func framesOfHex(t testing.TB, all []string) *Frames {
	var f Frames
	for _, s := range all {
		f.Add(unhexString(t, s))
	}
	return &f
}

func formOf(t testing.TB, name string) Form {
	i := slices.Index(formNames[:], name)
	if i < 0 {
		t.Fatalf("no form %q", name)
	}
	return Form(i)
}

func makeLookupFile(t *testing.T) (f lookupFile) {
	for _, n := range lookupRequests() {
		f.Requests = append(f.Requests, requestVector{n.name, n.r.Form.String(), requestFields(&n.r),
			hexAll(encodeRequest(&n.r))})
	}
	var p Parser
	var r LookupRequest
	loose := looseRequests()
	for _, name := range slices.Sorted(maps.Keys(loose)) {
		if err := p.Parse(framesOf(loose[name]), &r); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		f.Loose = append(f.Loose, requestVector{name, r.Form.String(), requestFields(&r), hexAll(loose[name])})
	}
	for _, n := range lookupReplies() {
		f.Replies = append(f.Replies, replyVector{n.name, n.r.Form.String(), replyFieldsOf(&n.r, &n.a),
			hex.EncodeToString(AppendReply(nil, &n.r, n.a))})
	}
	malformed := malformedRequests()
	for _, name := range slices.Sorted(maps.Keys(malformed)) {
		err := p.Parse(framesOf(malformed[name]), &r)
		if err == nil {
			t.Fatalf("%s: accepted", name)
		}
		e := reasonOf(t, err)
		reply := AppendReply(nil, &r, LookupReply{Status: LookupMalformed})
		f.Malformed = append(f.Malformed, malformedRequestVector{name, r.Form.String(), hexAll(malformed[name]),
			e.Field, hex.EncodeToString(reply)})
	}
	return f
}

func TestLookupVectors(t *testing.T) {
	file := checkFile(t, "lookup.json", makeLookupFile(t))
	for _, v := range file.Requests {
		t.Run(v.Name, func(t *testing.T) { checkRequestVector(t, v, true) })
	}
	for _, v := range file.Loose {
		t.Run(v.Name, func(t *testing.T) { checkRequestVector(t, v, false) })
	}
	for _, v := range file.Replies {
		t.Run(v.Name, func(t *testing.T) { checkReplyVector(t, v) })
	}
	var p Parser
	var r LookupRequest
	for _, v := range file.Malformed {
		err := p.Parse(framesOfHex(t, v.Frames), &r)
		if err == nil {
			t.Errorf("%s: accepted as %v", v.Name, r)
			continue
		}
		if e := reasonOf(t, err); e.Field != v.Field || r.Form.String() != v.Form {
			t.Errorf("%s: form %v, %v, want form %s, field %q", v.Name, r.Form, e, v.Form, v.Field)
		}
		if got := hex.EncodeToString(AppendReply(nil, &r, LookupReply{Status: LookupMalformed})); got != v.Reply {
			t.Errorf("%s: reply %s, want %s", v.Name, got, v.Reply)
		}
	}
}

func checkRequestVector(t *testing.T, v requestVector, canonical bool) {
	frames := framesOfHex(t, v.Frames)
	var p Parser
	var got LookupRequest
	if err := p.Parse(frames, &got); err != nil {
		t.Fatal(err)
	}
	want := LookupRequest{Form: formOf(t, v.Form)}
	fields := maps.Clone(v.Fields)
	delete(fields, "version")
	if err := fromFields(reflect.ValueOf(&want).Elem(), fields); err != nil {
		t.Fatal(err)
	}
	if !sameRequest(&got, &want) {
		t.Errorf("parsed %+v, the fields say %+v", got, want)
	}
	var again Frames
	if err := appendRequest(&again, &want); err != nil {
		t.Fatal(err)
	}
	if canonical && !sameFrames(&again, frames) {
		t.Errorf("encoded %x %v, want %x %v", again.Buf, again.Ends, frames.Buf, frames.Ends)
	}
}

func checkReplyVector(t *testing.T, v replyVector) {
	form, frame := formOf(t, v.Form), unhexString(t, v.Hex)
	got, err := decodeReply(form, frame)
	if err != nil {
		t.Fatal(err)
	}
	r := LookupRequest{Form: form}
	want := LookupReply{}
	fields := maps.Clone(v.Fields)
	delete(fields, "version")
	if err := fromFields(reflect.ValueOf(&want).Elem(), fields); err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("decoded %+v, the fields say %+v", got, want)
	}
	if again := AppendReply(nil, &r, want); !bytes.Equal(again, frame) {
		t.Errorf("encoded %x, want %x", again, frame)
	}
}

// sameRequest compares what two requests mean; empty and missing slices are the same.
func sameRequest(a, b *LookupRequest) bool {
	x, y := *a, *b
	same := bytes.Equal(x.Hashes, y.Hashes) && bytes.Equal(x.Groups, y.Groups)
	x.Hashes, y.Hashes, x.Groups, y.Groups = nil, nil, nil, nil
	return same && reflect.DeepEqual(x, y)
}

func sameFrames(a, b *Frames) bool { return bytes.Equal(a.Buf, b.Buf) && slices.Equal(a.Ends, b.Ends) }
