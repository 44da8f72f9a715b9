package ipc

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/wire/*.json anew from this package")

const wireDir = "../testdata/wire"

type sessionVector struct {
	Name    string         `json:"name"`
	Version uint32         `json:"version"`
	Message string         `json:"message"`
	Type    int            `json:"type"`
	Fields  map[string]any `json:"fields"`
	Hex     string         `json:"hex"`
}

type malformedVector struct {
	Name    string `json:"name"`
	Version uint32 `json:"version"`
	Hex     string `json:"hex"`
	Message string `json:"message"`
	Field   string `json:"field"`
}

type spaceVector struct {
	Register string `json:"register"` // name of a message
	Identity string `json:"identity"`
	Space    string `json:"space"`
}

type sessionFile struct {
	Messages  []sessionVector   `json:"messages"`
	Malformed []malformedVector `json:"malformed"`
	Spaces    []spaceVector     `json:"spaces"`
}

// checkFile compares a file of vectors with what this package makes, or writes it. It returns what
// is in the file.
func checkFile[T any](t *testing.T, name string, made T) (read T) {
	t.Helper()
	path := filepath.Join(wireDir, name)
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(made); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(old, b.Bytes()) {
		t.Errorf("%s is not what this package makes: a change of the protocol, or run "+
			"go test ./ipc -run Vectors -update", path)
	}
	d := json.NewDecoder(bytes.NewReader(old))
	d.UseNumber()
	d.DisallowUnknownFields()
	if err := d.Decode(&read); err != nil {
		t.Fatal(err)
	}
	return read
}

func unhexString(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func reasonOf(t testing.TB, err error) *MalformedError {
	t.Helper()
	var m *MalformedError
	if !errors.As(err, &m) {
		t.Fatalf("error %v (%T), want a *MalformedError", err, err)
	}
	return m
}

func makeSessionFile(t *testing.T) (f sessionFile) {
	for _, m := range sessionMessages() {
		frame, err := Encode(nil, m.msg)
		if err != nil {
			t.Fatalf("%s: %v", m.name, err)
		}
		typ, _ := readUint(frame[1:])
		f.Messages = append(f.Messages, sessionVector{Name: m.name, Version: m.version, Message: messages[typ].name,
			Type:   int(typ),
			Fields: toFields(reflect.ValueOf(m.msg)).(map[string]any), Hex: hex.EncodeToString(frame)})
		if r, ok := m.msg.(*Register); ok {
			space := r.Space()
			f.Spaces = append(f.Spaces, spaceVector{Register: m.name,
				Identity: hex.EncodeToString(r.AppendIdentity(nil)), Space: hex.EncodeToString(space[:])})
		}
	}
	for _, m := range malformedMessages() {
		_, err := Decode(m.frame)
		e := reasonOf(t, err)
		f.Malformed = append(f.Malformed, malformedVector{Name: m.name, Version: m.version,
			Hex:     hex.EncodeToString(m.frame),
			Message: e.Message, Field: e.Field})
	}
	return f
}

func TestSessionVectors(t *testing.T) {
	file := checkFile(t, "session.json", makeSessionFile(t))
	seen := map[int]bool{}
	for _, v := range file.Messages {
		t.Run(v.Name, func(t *testing.T) { checkSessionVector(t, v) })
		seen[v.Type] = true
	}
	for typ, m := range messages {
		if m != nil && !seen[typ] {
			t.Errorf("no vector holds %s", m.name)
		}
	}
	for _, v := range file.Malformed {
		_, err := Decode(unhexString(t, v.Hex))
		if err == nil {
			t.Errorf("%s: accepted", v.Name)
			continue
		}
		if e := reasonOf(t, err); e.Field != v.Field {
			t.Errorf("%s: %v, want field %q", v.Name, e, v.Field)
		}
	}
	checkSpaces(t, file)
}

func checkSessionVector(t *testing.T, v sessionVector) {
	frame := unhexString(t, v.Hex)
	msg, err := Decode(frame)
	if err != nil {
		t.Fatal(err)
	}
	want := reflect.New(messages[v.Type].of).Interface()
	if err := fromFields(reflect.ValueOf(want).Elem(), v.Fields); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(msg, want) {
		t.Errorf("decoded %+v, the fields say %+v", msg, want)
	}
	again, err := Encode(nil, want)
	if err != nil || !bytes.Equal(again, frame) {
		t.Errorf("encoded %x, %v, want %x", again, err, frame)
	}
}

func checkSpaces(t *testing.T, file sessionFile) {
	for _, v := range file.Spaces {
		for _, m := range file.Messages {
			if m.Name != v.Register {
				continue
			}
			msg, err := Decode(unhexString(t, m.Hex))
			if err != nil {
				t.Fatal(err)
			}
			r := msg.(*Register)
			space := r.Space()
			if got := hex.EncodeToString(r.AppendIdentity(nil)); got != v.Identity {
				t.Errorf("%s: identity %s, want %s", v.Register, got, v.Identity)
			}
			if got := hex.EncodeToString(space[:]); got != v.Space {
				t.Errorf("%s: space %s, want %s", v.Register, got, v.Space)
			}
		}
	}
}
