package peer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/servertest"
)

// TestLoadKey: a key that is short, or that others may read, is refused by the name of the option.
func TestLoadKey(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		bytes int
		mode  os.FileMode
		says  string
	}{
		{32, 0o600, ""}, {4096, 0o400, ""}, {31, 0o600, "31 bytes, allowed: 32 to 4096"}, {0, 0o600, "0 bytes"},
		{4097, 0o600, "allowed: 32 to 4096"}, {32, 0o604, "mode 0600"}, {32, 0o660, "mode 0600"},
		{32, 0o644, "mode 0600"}, {32, 0o444, "mode 0600"}, {32, 0o420, "mode 0600"}, {32, 0o610, "mode 0600"},
		{32, 0o640, ""}, {32, 0o440, ""}, // the files' group is this process's
	} {
		path := filepath.Join(dir, fmt.Sprint(c.bytes, c.mode))
		check(t, os.WriteFile(path, make([]byte, c.bytes), c.mode))
		check(t, os.Chmod(path, c.mode))
		a, err := LoadKey(path)
		if c.says == "" {
			if err != nil || a.String() != "key" || len(a.key) != c.bytes {
				t.Errorf("%v, %v", a, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), "--peer-key-file "+path) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, not %q", err, c.says)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		if _, err := LoadKey(path); err == nil || !strings.HasPrefix(err.Error(), "--peer-key-file "+path) {
			t.Error(err)
		}
	}
	secret, err := Key([]byte(strings.Repeat("secret", 6)))
	check(t, err)
	if text := fmt.Sprintf("%v %+v %#v %s", secret, secret, secret, secret); strings.Contains(text, "secret") {
		t.Errorf("a key is printed: %s", text)
	}
}

// TestLoadTLS: what is missing or is no certificate is refused by the name of the file.
func TestLoadTLS(t *testing.T) {
	dir := t.TempDir()
	servertest.Certificate(t, dir)
	cert, key, junk := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "junk")
	check(t, os.WriteFile(junk, []byte("junk"), 0o600))
	if a, err := LoadTLS(cert, key, cert); err != nil || a.String() != "tls" {
		t.Errorf("%v, %v", a, err)
	}
	for _, c := range []struct{ cert, key, ca, says string }{
		{junk, key, cert, "certificate " + junk}, {cert, junk, cert, "key " + junk},
		{cert, key, junk, "authorities " + junk}, {cert, key, dir + "/none", "authorities " + dir + "/none: no such"},
	} {
		if _, err := LoadTLS(c.cert, c.key, c.ca); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, not %q", err, c.says)
		}
	}
}

// TestOptions: a peering without a key and a request out of its ranges are refused by their names.
func TestOptions(t *testing.T) {
	a := newAgent(t, 1<<20, specOf(1, 4096))
	cfg, ccfg := a.config(), a.clientConfig()
	cfg.Auth, ccfg.Auth = Auth{}, Auth{}
	for _, err := range []error{cfg.complete(), ccfg.complete()} {
		if err == nil || !strings.Contains(err.Error(), "Auth") {
			t.Errorf("%v", err)
		}
	}
	h := chain("a", 2)
	for says, change := range map[string]func(*Request){
		"Groups[1]": func(r *Request) { r.Groups[1].Group = 0 },
		"blocks":    func(r *Request) { r.Groups[0].Hashes = chain("a", MaxHashes) },
	} {
		r := a.request("r", h)
		change(&r)
		if err := r.check(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}
