package peer

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"
)

// MinKey and MaxKey bound the bytes of a shared key.
const (
	MinKey = 32
	MaxKey = 4096
)

// Auth is how two agents know each other: by a shared key, or by certificates. LoadKey and LoadTLS
// make one; the zero value is none.
type Auth struct {
	key []byte
	tls *tls.Config
}

func (a *Auth) given() bool { return len(a.key) > 0 || a.tls != nil }

// String names the kind, and nothing secret.
func (a Auth) String() string {
	switch {
	case a.tls != nil:
		return "tls"
	case len(a.key) > 0:
		return "key"
	}
	return "none"
}

// GoString is String: a key is not printed by mistake.
func (a Auth) GoString() string { return a.String() }

// Key returns the Auth of a shared key of MinKey to MaxKey bytes. Every byte after the handshake is
// authenticated under it. It does not encrypt.
func Key(key []byte) (Auth, error) {
	if len(key) < MinKey || len(key) > MaxKey {
		return Auth{}, fmt.Errorf("%d bytes, allowed: %d to %d", len(key), MinKey, MaxKey)
	}
	return Auth{key: append([]byte(nil), key...)}, nil
}

// LoadKey reads a shared key from a file that only its owner may read, or also a group of this
// process, as of a mounted Kubernetes secret. All bytes of the file count.
func LoadKey(path string) (Auth, error) {
	a, err := loadKey(path)
	if err != nil {
		return Auth{}, fmt.Errorf("--peer-key-file %s: %w", path, err)
	}
	return a, nil
}

func loadKey(path string) (Auth, error) {
	f, err := os.Open(path)
	if err != nil {
		return Auth{}, pathless(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Auth{}, pathless(err)
	}
	groups, err := os.Getgroups()
	if err != nil {
		return Auth{}, err
	}
	if err := secretive(info, append(groups, os.Getegid())); err != nil {
		return Auth{}, err
	}
	key, err := io.ReadAll(io.LimitReader(f, MaxKey+1))
	if err != nil {
		return Auth{}, pathless(err)
	}
	return Key(key)
}

// secretive returns an error for a file that others than its owner and this process's groups may
// read, or others than its owner write.
func secretive(info fs.FileInfo, groups []int) error {
	group := -1
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		group = int(st.Gid)
	}
	switch perm := info.Mode().Perm(); {
	case !info.Mode().IsRegular() || perm&0o037 != 0:
		return fmt.Errorf("is %v, allowed: a regular file with mode 0600 or 0400, or 0640 or 0440 if its group is one "+
			"of the agent's", info.Mode())
	case perm&0o040 != 0 && !slices.Contains(groups, group):
		return fmt.Errorf("is %v of group %d, allowed: mode 0600 or 0400, or a group of the agent (%v)", info.Mode(),
			group, groups)
	}
	return nil
}

// LoadTLS reads a certificate, its key, and the authorities that signed the certificates of the
// other agents. Both sides prove theirs, in TLS 1.3. A client also checks that the certificate is
// of the host that it connects to.
func LoadTLS(cert, key, authorities string) (Auth, error) {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return Auth{}, fmt.Errorf("certificate %s, key %s: %w", cert, key, pathless(err))
	}
	pem, err := os.ReadFile(authorities)
	if err != nil {
		return Auth{}, fmt.Errorf("authorities %s: %w", authorities, pathless(err))
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return Auth{}, fmt.Errorf("authorities %s: no certificate in it, allowed: PEM", authorities)
	}
	return Auth{tls: &tls.Config{
		Certificates: []tls.Certificate{pair},
		RootCAs:      pool,
		ClientCAs:    pool,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		MinVersion:   tls.VersionTLS13,
	}}, nil
}

// pathless drops the path of a file's error: the caller names it.
func pathless(err error) error {
	if p := (*os.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}
