//! Proving to each other that both ends of a connection know the deployment's secret (`KVATLAS_SECRET`), without sending
//! it: a challenge and a response in both directions, over random numbers of both sides.
//!
//! Who made the connection is the *caller*, the other one the *listener*; which of them is the agent does not matter.
//!
//! | who | says | proves |
//! |---|---|---|
//! | caller | [`Hello`]: its name, when it is an agent, and 32 random bytes | |
//! | listener | [`Challenge`]: 32 random bytes, and whether it wants a proof | |
//! | caller | [`Proof`]: HMAC-SHA256 over both, as caller | that it knows the secret, now |
//! | listener | [`Welcome`]: HMAC-SHA256 over both, as listener | the same |
//!
//! The caller proves first: a listener gives nothing away to who cannot. A proof of another connection is of no use,
//! since the listener's bytes were others; nor is the caller's own one sent back to it, since the role is hashed too.
//! This says who is there; it does not hide or seal what follows. Where somebody may sit in between, use TLS below.

use crate::id::{EngineId, Epoch};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Fewest bytes of a secret.
pub const MIN_SECRET_BYTES: usize = 16;
/// Most bytes of a secret.
pub const MAX_SECRET_BYTES: usize = 4096;
/// Random bytes of one side.
pub const NONCE_BYTES: usize = 32;
/// Random bytes of one side: drawn for this connection alone.
pub type Nonce = [u8; NONCE_BYTES];

/// The deployment's secret. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a text is no secret. Does not repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it has {0} bytes; a secret has 16 to 4096 (as from: openssl rand -hex 32)")]
pub struct BadSecret(usize);

impl Secret {
    /// The secret, without white space at its ends (a file ends in a line break).
    ///
    /// # Errors
    /// When it is shorter than [`MIN_SECRET_BYTES`] or longer than [`MAX_SECRET_BYTES`].
    pub fn new(text: &str) -> Result<Self, BadSecret> {
        let text = text.trim();
        if !(MIN_SECRET_BYTES..=MAX_SECRET_BYTES).contains(&text.len()) {
            return Err(BadSecret(text.len()));
        }
        Ok(Self(text.as_bytes().to_vec()))
    }
}

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// An agent that dials in says its engine; an index that calls an agent says nothing.
    #[serde(default)]
    pub engine: Option<EngineId>,
    /// The agent's process life.
    #[serde(default)]
    pub epoch: Option<Epoch>,
    /// The caller's random bytes.
    #[serde(with = "serde_bytes")]
    pub nonce: Nonce,
}

/// The listener's answer to a [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The listener's random bytes.
    #[serde(with = "serde_bytes")]
    pub nonce: Nonce,
    /// It has a secret, so it serves only who proves to know it, and proves it itself.
    pub wanted: bool,
}

/// The caller's answer to a [`Challenge`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// HMAC-SHA256; empty when none is wanted.
    #[serde(with = "serde_bytes")]
    pub mac: Vec<u8>,
}

/// The listener's answer to a good [`Proof`]: what comes next is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// HMAC-SHA256; empty when none was wanted.
    #[serde(with = "serde_bytes")]
    pub mac: Vec<u8>,
}

/// Why the other side is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// It wants a proof, and there is no secret here.
    #[error("the other side wants proof of KVATLAS_SECRET, and none is set here: set the same on both sides")]
    NoSecretHere,
    /// There is a secret here, and the other side has none.
    #[error("KVATLAS_SECRET is set here, and the other side has none: set the same on both sides")]
    NoSecretThere,
    /// The proof is not one of this secret and this connection.
    #[error("its proof is wrong: KVATLAS_SECRET must be the same on both sides")]
    WrongProof,
    /// A proof before a hello, or a second one.
    #[error("it does not keep to the order of hello, challenge, proof, welcome")]
    OutOfOrder,
}

#[derive(Clone, Copy)]
enum Role {
    Caller,
    Listener,
}

/// What both sides hash: all fields have a fixed length or one before them, so two transcripts are never one text.
fn mac(secret: &Secret, role: Role, hello: &Hello, challenge: &Challenge) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).ok()?;
    mac.update(match role {
        Role::Caller => b"kvatlas proof 1, caller  ",
        Role::Listener => b"kvatlas proof 1, listener",
    });
    mac.update(&hello.nonce);
    mac.update(&challenge.nonce);
    let engine = hello.engine.as_ref().map(ToString::to_string).unwrap_or_default();
    mac.update(&(engine.len() as u64).to_le_bytes());
    mac.update(engine.as_bytes());
    let epoch = hello.epoch.unwrap_or_default();
    mac.update(&epoch.start_ms.to_le_bytes());
    mac.update(&epoch.random.to_le_bytes());
    Some(mac)
}

fn prove(secret: &Secret, role: Role, hello: &Hello, challenge: &Challenge) -> Vec<u8> {
    // HMAC takes keys of any length; an empty proof would be refused.
    mac(secret, role, hello, challenge).map(|mac| mac.finalize().into_bytes().to_vec()).unwrap_or_default()
}

/// Compares in constant time.
fn check(secret: &Secret, role: Role, hello: &Hello, challenge: &Challenge, told: &[u8]) -> Result<(), Untrusted> {
    let mac = mac(secret, role, hello, challenge).ok_or(Untrusted::WrongProof)?;
    mac.verify_slice(told).map_err(|_| Untrusted::WrongProof)
}

/// Who made the connection.
#[derive(Debug)]
pub struct Caller {
    hello: Hello,
    /// With a secret, must the listener have one too? A dialled index must: an agent tells all to it.
    strict: bool,
}

impl Caller {
    /// Sends this hello first. `strict`: a listener without a secret is not trusted when there is one here.
    pub fn new(hello: Hello, strict: bool) -> Self {
        Self { hello, strict }
    }

    /// What is sent first.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The answer to the listener's challenge.
    ///
    /// # Errors
    /// When only one side has a secret (with [`Caller::new`]'s exception).
    pub fn prove(&self, secret: Option<&Secret>, challenge: &Challenge) -> Result<Proof, Untrusted> {
        match (secret, challenge.wanted) {
            (Some(secret), true) => Ok(Proof { mac: prove(secret, Role::Caller, &self.hello, challenge) }),
            (Some(_), false) if self.strict => Err(Untrusted::NoSecretThere),
            (_, false) => Ok(Proof { mac: Vec::new() }),
            (None, true) => Err(Untrusted::NoSecretHere),
        }
    }

    /// Judges the listener's welcome.
    ///
    /// # Errors
    /// When it proves nothing although it wanted a proof.
    pub fn trust(&self, secret: Option<&Secret>, challenge: &Challenge, welcome: &Welcome) -> Result<(), Untrusted> {
        match secret.filter(|_| challenge.wanted) {
            Some(secret) => check(secret, Role::Listener, &self.hello, challenge, &welcome.mac),
            None => Ok(()),
        }
    }
}

/// Who was called: one for each connection.
#[derive(Debug)]
pub struct Listener {
    challenge: Challenge,
    hello: Option<Hello>,
    open: bool,
}

impl Listener {
    /// A fresh connection. `nonce`: drawn for it alone. Without a secret everything is served at once.
    pub fn new(secret: Option<&Secret>, nonce: Nonce) -> Self {
        Self { challenge: Challenge { nonce, wanted: secret.is_some() }, hello: None, open: secret.is_none() }
    }

    /// Is what the caller asks served?
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Takes the caller's hello. One a connection: a second challenge would be the same one.
    ///
    /// # Errors
    /// When there was one before.
    pub fn challenge(&mut self, hello: Hello) -> Result<Challenge, Untrusted> {
        if self.hello.is_some() {
            return Err(Untrusted::OutOfOrder);
        }
        self.hello = Some(hello);
        Ok(self.challenge.clone())
    }

    /// Judges the caller's proof; from then on it is served. One try a connection.
    ///
    /// # Errors
    /// When there was no hello, or the proof is wrong.
    pub fn welcome(&mut self, secret: Option<&Secret>, proof: &Proof) -> Result<Welcome, Untrusted> {
        let hello = self.hello.as_ref().ok_or(Untrusted::OutOfOrder)?;
        let Some(secret) = secret else { return Ok(Welcome { mac: Vec::new() }) };
        let judged = check(secret, Role::Caller, hello, &self.challenge, &proof.mac);
        let mac = prove(secret, Role::Listener, hello, &self.challenge);
        if judged.is_err() {
            // No second guess at this challenge: the connection stays shut.
            self.hello = None;
            self.challenge.nonce = [0; NONCE_BYTES];
        }
        judged?;
        self.open = true;
        Ok(Welcome { mac })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn hello(nonce: u8) -> Hello {
        Hello {
            engine: Some(EngineId::new("a", 1)),
            epoch: Some(Epoch { start_ms: 1, random: 2 }),
            nonce: [nonce; NONCE_BYTES],
        }
    }

    /// Lets a caller and a listener meet; each with its own secret.
    fn meet(ours: Option<&Secret>, theirs: Option<&Secret>, strict: bool) -> Result<bool, Untrusted> {
        let mut listener = Listener::new(theirs, [2; NONCE_BYTES]);
        let caller = Caller::new(hello(1), strict);
        let challenge = listener.challenge(caller.hello().clone())?;
        let proof = caller.prove(ours, &challenge)?;
        let welcome = listener.welcome(theirs, &proof)?;
        caller.trust(ours, &challenge, &welcome)?;
        Ok(listener.is_open())
    }

    #[test]
    fn only_the_same_secret_on_both_sides_opens() {
        let (one, other) = (secret("0123456789abcdef"), secret("0123456789abcdeX"));
        assert_eq!(meet(Some(&one), Some(&one), true), Ok(true));
        assert_eq!(meet(None, None, true), Ok(true));
        assert_eq!(meet(Some(&one), Some(&other), true), Err(Untrusted::WrongProof));
        assert_eq!(meet(None, Some(&one), true), Err(Untrusted::NoSecretHere));
        assert_eq!(meet(Some(&one), None, true), Err(Untrusted::NoSecretThere));
        assert_eq!(meet(Some(&one), None, false), Ok(true));
    }

    #[test]
    fn a_proof_of_another_connection_or_role_or_name_is_worth_nothing() -> Result<(), Untrusted> {
        let secret = secret("0123456789abcdef");
        let caller = Caller::new(hello(1), true);
        let mut first = Listener::new(Some(&secret), [2; NONCE_BYTES]);
        let challenge = first.challenge(caller.hello().clone())?;
        let proof = caller.prove(Some(&secret), &challenge)?;
        let welcome = first.welcome(Some(&secret), &proof)?;

        // Replayed to a listener that drew other bytes.
        let mut second = Listener::new(Some(&secret), [3; NONCE_BYTES]);
        second.challenge(caller.hello().clone())?;
        assert_eq!(second.welcome(Some(&secret), &proof), Err(Untrusted::WrongProof));
        assert!(!second.is_open());
        // The listener's own proof sent back to it, and the caller's to the caller.
        let mut third = Listener::new(Some(&secret), [2; NONCE_BYTES]);
        third.challenge(caller.hello().clone())?;
        assert_eq!(third.welcome(Some(&secret), &Proof { mac: welcome.mac }), Err(Untrusted::WrongProof));
        let echoed = Welcome { mac: proof.mac.clone() };
        assert_eq!(caller.trust(Some(&secret), &challenge, &echoed), Err(Untrusted::WrongProof));
        // Under another name or of another process life.
        for other in [
            Hello { engine: Some(EngineId::new("a", 2)), ..hello(1) },
            Hello { engine: None, ..hello(1) },
            Hello { epoch: Some(Epoch { start_ms: 9, random: 2 }), ..hello(1) },
        ] {
            let mut listener = Listener::new(Some(&secret), [2; NONCE_BYTES]);
            listener.challenge(other)?;
            assert_eq!(listener.welcome(Some(&secret), &proof), Err(Untrusted::WrongProof));
        }
        // Cut short, empty, or too long.
        for mac in [proof.mac[..31].to_vec(), vec![], [&proof.mac[..], &[0]].concat()] {
            let mut listener = Listener::new(Some(&secret), [2; NONCE_BYTES]);
            listener.challenge(hello(1))?;
            assert_eq!(listener.welcome(Some(&secret), &Proof { mac }), Err(Untrusted::WrongProof));
        }
        Ok(())
    }

    #[test]
    fn there_is_one_try_a_connection() -> Result<(), Untrusted> {
        let secret = secret("0123456789abcdef");
        let mut listener = Listener::new(Some(&secret), [2; NONCE_BYTES]);
        assert_eq!(listener.welcome(Some(&secret), &Proof { mac: vec![] }), Err(Untrusted::OutOfOrder));
        let caller = Caller::new(hello(1), true);
        let challenge = listener.challenge(hello(1))?;
        assert_eq!(listener.challenge(hello(1)), Err(Untrusted::OutOfOrder));
        assert_eq!(listener.welcome(Some(&secret), &Proof { mac: vec![1; 32] }), Err(Untrusted::WrongProof));
        let good = caller.prove(Some(&secret), &challenge)?;
        assert_eq!(listener.welcome(Some(&secret), &good), Err(Untrusted::OutOfOrder));
        assert!(!listener.is_open());
        Ok(())
    }

    #[test]
    fn a_proof_is_the_hmac_that_others_compute() {
        // python3: hmac.new(b"0123456789abcdef", b"kvatlas proof 1, caller  " + b"\1"*32 + b"\2"*32
        //   + (3).to_bytes(8, "little") + b"a.1" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little"), "sha256")
        let challenge = Challenge { nonce: [2; NONCE_BYTES], wanted: true };
        let proof = Caller::new(hello(1), true).prove(Some(&secret("0123456789abcdef")), &challenge);
        let hex = proof.map(|proof| proof.mac.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        assert_eq!(hex.as_deref(), Ok("6bb1883823e50b924894d693789f3259219abba8b3d6bd54a970496446fdf837"));
    }

    #[test]
    fn a_short_secret_is_refused_and_none_is_ever_shown() {
        assert_eq!(Secret::new(" 0123456789abcde\n"), Err(BadSecret(15)));
        assert!(Secret::new(&"x".repeat(MAX_SECRET_BYTES + 1)).is_err());
        assert_eq!(Secret::new("0123456789abcdef\n"), Secret::new("0123456789abcdef"));
        assert_eq!(format!("{:?}", secret("0123456789abcdef")), "Secret(..)");
    }
}
